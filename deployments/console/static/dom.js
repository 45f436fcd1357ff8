// Elements from data. Text is only ever set as text, never as markup.

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean | EventListener>} [props] attributes; `on...` are listeners, a
 *   boolean sets or leaves out an attribute
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/**
 * The element of the page with this id.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function find(id, kind) {
  const element = document.getElementById(id);
  if (!(element instanceof kind)) throw new Error(`the page has no ${kind.name} #${id}`);
  return element;
}

/**
 * Bring the children of an element into line with a list. Those of items that were there before stay, and keep the
 * focus.
 * @template T
 * @param {HTMLElement} parent
 * @param {Iterable<T>} items
 * @param {(item: T) => string} keyOf unique among them
 * @param {(item: T) => HTMLElement} create
 * @param {(element: HTMLElement, item: T) => void} [update]
 */
export function reconcile(parent, items, keyOf, create, update = () => {}) {
  const known = new Map(Array.from(parent.children, (child) => [/** @type {HTMLElement} */ (child).dataset["key"], child]));
  let previous = /** @type {Element | null} */ (null);
  for (const item of items) {
    const key = keyOf(item);
    let element = /** @type {HTMLElement | undefined} */ (known.get(key));
    known.delete(key);
    if (element === undefined) {
      element = create(item);
      element.dataset["key"] = key;
    }
    update(element, item);
    const next = previous === null ? parent.firstElementChild : previous.nextElementSibling;
    if (next !== element) parent.insertBefore(element, next);
    previous = element;
  }
  for (const child of known.values()) child.remove();
}

/** @param {HTMLElement} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Have a screen reader say something. @param {string} text */
export function announce(text) {
  find("announcer", HTMLParagraphElement).textContent = text;
}
