// Small helpers to make elements.

export const byId = (id) => document.getElementById(id);

/** Return a new element. Properties with a dash are attributes; strings among the children become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for" || name === "scope") element.setAttribute(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Set the text of an element, if it changes. */
export function show(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}
