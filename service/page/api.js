// Requests to the server. The API key, if the server asks for one, is kept in memory only.

let key = null;

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

/** Send a request and return its response. Throws Refused, or TypeError if the server does not answer. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
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
