// The two pictures: when each rank was in which layer of a prompt, and the last requests.

import { make, pace, plural, seconds } from "./elements.js";

const COLOURS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis

// The last long prompt: a bar per rank, whose pieces are layers.

export const begin = (part) => Math.min(...part.spans.map((span) => span[2]));
export const end = (part) => Math.max(...part.spans.map((span) => span[3]));

function endOf(part, layer) {
  return Math.max(...part.spans.filter((span) => span[0] === "compute" && span[1] === layer).map((span) => span[3]));
}

export function skew(parts, width) {
  const left = 52, height = 30, pitch = 48, bottom = (parts.length - 1) * pitch + height;
  const all = Math.max(...parts.map(end)) || 1;
  const layers = 1 + Math.max(0, ...parts.flatMap((part) => part.spans.map((span) => span[1] ?? 0)));
  const x = (time) => left + ((width - left - 12) * time) / all;
  const when = (part) => `rank ${part.rank} from ${seconds(begin(part))} to ${seconds(end(part))}`;
  const label = `When each rank was in which of ${plural(layers, "layer")}: ${parts.map(when).join(", ")}`;
  const svg = make("svg", { width, height: bottom + 22, role: "img", "aria-label": label }, hatching());
  parts.forEach((part, row) => {
    svg.append(make("text", { x: 0, y: row * pitch + height / 2 + 4 }, `rank ${part.rank}`));
    for (const [kind, layer, from, to] of part.spans) {
      const face = layer === null ? { class: "other" } : colour(layer, layers);
      const look = kind === "wait" ? { fill: "url(#hatch)" } : face;
      const size = { width: Math.max(0.5, x(to) - x(from) - 0.5), height };
      svg.append(make("rect", { x: x(from), y: row * pitch, ...size, ...look }));
    }
  });
  const marked = new Set([0, 1, 2, 3, 4].map((step) => Math.round((step * (layers - 1)) / 4)));
  for (let row = 1; row < parts.length; row += 1) {
    for (const layer of marked) {
      const [upper, lower] = [endOf(parts[row - 1], layer), endOf(parts[row], layer)];
      if (upper === -Infinity || lower === -Infinity) continue;
      const ys = [0, height, pitch, pitch + height].map((y) => (row - 1) * pitch + y);
      const points = [upper, upper, lower, lower].map((time, at) => `${x(time)},${ys[at]}`);
      svg.append(make("polyline", { points: points.join(" "), class: "skew" }));
    }
  }
  svg.append(make("line", { x1: left, x2: width, y1: bottom + 4, y2: bottom + 4, class: "axis" }));
  for (const time of ticks(all, Math.min(5, Math.floor((width - left) / 70)))) {
    const at = { x: x(time), y: bottom + 18, "text-anchor": x(time) > width - 30 ? "end" : "middle" };
    svg.append(make("text", at, time ? `${time} s` : "0"));
  }
  return svg;
}

// Round numbers from 0 to at most `most`, at most one more than `several`.
function ticks(most, several) {
  const least = 10 ** Math.floor(Math.log10(most / several));
  const step = [1, 2, 5, 10].map((each) => each * least).find((each) => most / each <= several);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, at) => Number((at * step).toPrecision(3)));
}

function colour(layer, layers) {
  const place = (4 * layer) / Math.max(1, layers - 1), low = Math.min(3, Math.floor(place));
  const mixed = COLOURS[low].map((from, at) => Math.round(from + (COLOURS[low + 1][at] - from) * (place - low)));
  return { fill: `rgb(${mixed})` };
}

function hatching() {
  const turned = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  return make("defs", {}, make("pattern", turned, make("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "hatch" })));
}

// The last requests: two rows of bars over each other, a request in each column.

const ROWS = [
  { name: "TTFT", of: "ttft_s", text: seconds, told: (value) => `TTFT ${seconds(value)}`, class: "ttft" },
  { name: "Tokens per s", of: "tokens_per_s", text: pace, told: (value) => `${pace(value)} tokens per s`, class: "pace" },
];

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length / 2;
  return (sorted[Math.ceil(middle) - 1] + sorted[Math.floor(middle)]) / 2;
}

const known = (requests, row) => requests.map((each) => each[row.of]).filter((value) => value !== null);

// The medians in words.
export function medians(requests) {
  const all = ROWS.map((row) => [row, known(requests, row)]).filter(([, values]) => values.length);
  return all.map(([row, values]) => row.told(median(values))).join(", ") || "none has an answer";
}

export function told(request) {
  const { prompt_tokens, new_tokens, ttft_s, tokens_per_s, how } = request;
  const first = ttft_s === null ? "no token" : `TTFT ${seconds(ttft_s)}`;
  const next = tokens_per_s === null ? "" : `, ${pace(tokens_per_s)} per s`;
  return `${plural(prompt_tokens, "token")}: ${first}; ${plural(new_tokens, "new token")}${next}; ${how}`;
}

export function requestsPlot(requests, width) {
  const right = 52, top = 20, height = 56, pitch = 88;
  const step = Math.min(22, (width - right) / requests.length), across = Math.max(1.5, step * 0.72);
  const x = (at) => width - right - (requests.length - at) * step + (step - across) / 2; // the newest at the right
  const label = `${plural(requests.length, "request")}, the newest at the right; medians: ${medians(requests)}`;
  const svg = make("svg", { width, height: pitch + top + height + 6, role: "img", "aria-label": label });
  ROWS.forEach((row, number) => {
    const foot = number * pitch + top + height, values = known(requests, row), most = Math.max(...values);
    svg.append(make("text", { x: 0, y: foot - height - 7, class: "name" }, row.name));
    svg.append(make("line", { x1: 0, x2: width - right, y1: foot + 0.5, y2: foot + 0.5, class: "axis" }));
    if (!values.length) return;
    for (const value of [most, median(values)]) {
      const y = foot - (height * value) / most + 0.5;
      svg.append(make("line", { x1: 0, x2: width - right, y1: y, y2: y, class: "grid" }));
    }
    const middle = foot - (height * median(values)) / most;
    svg.append(make("text", { x: width - right + 6, y: foot - height + 4 }, row.text(most)));
    if (middle > foot - height + 14) {
      svg.append(make("text", { x: width - right + 6, y: middle + 4, class: "quiet" }, row.text(median(values))));
    }
    requests.forEach((request, at) => {
      const value = request[row.of], tall = value === null ? 0 : Math.max(1.5, (height * value) / most);
      const place = { x: x(at), y: foot - tall, width: across, height: tall, rx: Math.min(2, across / 3, tall / 2) };
      const bar = make("rect", { ...place, class: row.class });
      if (value !== null) return svg.append(make("g", {}, make("title", {}, told(request)), bar));
      if (number || request.ttft_s !== null) return; // no answer at all is marked once
      const [from, to] = [x(at) + across / 2 - 3, x(at) + across / 2 + 3];
      const cross = make("path", { d: `M${from} ${foot - 9}L${to} ${foot - 3}M${to} ${foot - 9}L${from} ${foot - 3}` });
      cross.setAttribute("class", "none");
      svg.append(make("g", {}, make("title", {}, told(request)), cross));
    });
  });
  return svg;
}
