// Requests to the server. The API key, if the server asks for one, is kept in memory only.

let key = null;
// The numbers of a server that has stopped answering must not look alive.
const PATIENCE_MS = 10_000;

/** An error response of the server. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(entered) {
  key = entered;
}

export function hasKey() {
  return key !== null;
}

/** Read numbers of the server. Throws as `ask`, and DOMException if the server does not answer in time. */
export function read(path) {
  return ask(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
}

/** Send a request and return its response. Throws Refused, or TypeError if the server does not answer. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  // A browser cannot send other characters, and no key of a server has them.
  if (key !== null && /[^ -~]/.test(key)) throw new Refused(401, "The server does not accept this key.");
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not the JSON of this server, such as a page of a proxy.
  }
  throw new Refused(response.status, message);
}

/** Send JSON by POST and return the response. Throws as `ask`. */
export function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body) });
}
