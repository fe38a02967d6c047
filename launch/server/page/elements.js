// Texts and elements. What the server and the model say becomes text nodes, never HTML.

const SVG = ["svg", "defs", "g", "pattern", "rect", "line", "path", "polyline", "text", "title"];

export const count = (number) => number.toLocaleString("en");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const total = (numbers) => numbers.reduce((sum, each) => sum + each, 0);
export const seconds = (time) => (time < 1 ? `${Math.round(1000 * time)}\u00a0ms` : `${short(time)}\u00a0s`);
export const pace = (perSecond) => (perSecond < 100 ? `${Number(perSecond.toPrecision(2))}` : count(Math.round(perSecond)));

function short(time) {
  return time < 100 ? time.toFixed(time < 10 ? 2 : 1) : count(Math.round(time));
}

export function bytes(number) {
  if (!number) return number === 0 ? "0" : "unknown";
  const power = Math.min(3, Math.floor(Math.log(number) / Math.log(1024)));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${["bytes", "KiB", "MiB", "GiB"][power]}`;
}

export function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

export const find = (id) => document.getElementById(id);

export function say(id, text) {
  if (find(id).textContent !== text) find(id).textContent = text; // what is announced is announced once
}

export function make(name, attributes = {}, ...children) {
  const space = SVG.includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

export function describe(id, pairs) {
  const both = ([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text));
  find(id).replaceChildren(...pairs.map(both));
}

// The rows of a table. A narrow one of many columns shows each row as lines with the names of the columns, for which
// browsers need to be told that it is still a table.
export function fill(id, lines) {
  const table = find(id);
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  const head = (text) => make("th", { scope: "row", role: "rowheader" }, text);
  const cells = (texts) => texts.map((text, at) => make("td", { role: "cell", "data-name": names[at + 1] }, text));
  table.hidden = !lines.length;
  const rows = lines.map(([first, ...rest]) => make("tr", { role: "row" }, head(first), ...cells(rest)));
  table.querySelector("tbody").replaceChildren(...rows);
}
