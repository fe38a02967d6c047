"use strict";
// What the server and the model say becomes text nodes, never HTML.

const COLOURS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis
const SVG = ["svg", "defs", "pattern", "rect", "line", "polyline", "text"];

let key = ""; // of the API; it is kept here alone
let timer = 0;
let shown = null; // the last state of the server
let drawn = ""; // which prompt the picture shows, and how wide

// Texts.

const count = (number) => number.toLocaleString("en");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const total = (numbers) => numbers.reduce((sum, each) => sum + each, 0);
const seconds = (time) => (time < 1 ? `${Math.round(1000 * time)} ms` : `${time.toFixed(time < 10 ? 2 : 1)} s`);

function bytes(number) {
  if (!number) return number === 0 ? "0" : "unknown";
  const power = Math.min(3, Math.floor(Math.log(number) / Math.log(1024)));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${["bytes", "KiB", "MiB", "GiB"][power]}`;
}

// Elements.

const find = (id) => document.getElementById(id);

function say(id, text) {
  if (find(id).textContent !== text) find(id).textContent = text; // what is announced is announced once
}

function make(name, attributes = {}, ...children) {
  const space = SVG.includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

function fill(id, lines) {
  const head = (text) => make("th", { scope: "row" }, text);
  const cells = (texts) => texts.map((text) => make("td", {}, text));
  find(id).hidden = !lines.length;
  const rows = lines.map(([first, ...rest]) => make("tr", {}, head(first), ...cells(rest)));
  find(id).querySelector("tbody").replaceChildren(...rows);
}

// The state of the server.

async function poll() {
  if (!document.hidden) {
    const answer = await fetch("state", { headers: withKey(), cache: "no-store" }).catch(() => null);
    if (answer?.status === 401) return lock();
    const state = answer?.ok ? await answer.json().catch(() => null) : null;
    if (state) show(state);
    else say("trouble", answer ? `The server answers with status ${answer.status}.` : "The server does not answer.");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, 1000);
}

function show(state) {
  shown = state;
  const { limits, ranks, rows, waiting } = state;
  find("unlock").hidden = true;
  say("about", `${state.model} on ${plural(ranks.length, "rank")} (${state.device}), ${state.prefill}`);
  say("trouble", state.refuses === null ? "" : `No more questions are taken: ${state.refuses}.`);
  find("slower").replaceChildren(...state.slower.map((sentence) => make("li", {}, sentence)));
  find("is-slower").hidden = state.slower.length === 0;
  const most = limits.max_tokens === null ? "" : ` of at most ${count(limits.max_tokens)}`;
  const facts = [
    ["Waiting", `${plural(waiting.length, "request")}, ${plural(total(waiting), "token")}`],
    ["Answering", `${plural(rows.length, "row")} of at most ${count(limits.batch)}`],
    ["Room taken", `${plural(state.num_tokens, "token")}${most}`],
    ["Prefixes kept", Object.entries(state.prefixes).map(([tier, size]) => `${tier} ${bytes(size)}`).join(", ") || "none"],
    ["Decoding step", state.step_s ? seconds(state.step_s) : "not known yet"],
    ...stored(state),
  ];
  find("facts").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  find("prefills").replaceChildren(...state.prefills.map((each) => running(each, ranks)));
  fill("rows", rows.map((lengths) => lengths.map(count)));
  showLast(state);
  const tiers = ["weights", "live_kv", "prefill_kv", "host_kv", "peak"];
  fill("memory", state.memory.map((each) => [ranks[each.rank], ...tiers.map((tier) => bytes(each[tier]))]));
  find("no-memory").hidden = state.memory.length > 0;
}

function stored({ prompts, stored }) {
  if (stored === null) return [];
  const share = prompts.tokens ? ` (${((100 * prompts.found) / prompts.tokens).toFixed(0)}%)` : "";
  const size = `${bytes(stored.bytes)} of at most ${bytes(stored.most_bytes)}`;
  return [
    ["Found of prompts", `${count(prompts.found)} of ${plural(prompts.tokens, "token")}${share}`],
    ["Stored texts", `${plural(stored.tokens, "token")}, ${size}`],
  ];
}

function running(prefill, ranks) {
  const left = prefill.predicted_s - prefill.elapsed_s;
  const rest = left > 0 ? `${seconds(left)} left by prediction` : "longer than predicted";
  const alone = prefill.is_short ? " by the last stage alone" : "";
  const what = `Computing ${plural(total(prefill.lengths), "token")}${alone}: ${seconds(prefill.elapsed_s)} so far`;
  const tells = (rank) => !prefill.is_short || prefill.progress.some((each) => each.rank === rank);
  const lines = ranks.flatMap((name, rank) => (tells(rank) ? [layersOf(name, rank, prefill)] : []));
  return make("div", {}, make("p", {}, prefill.predicted_s ? `${what}, ${rest}` : what), ...lines);
}

function layersOf(name, rank, prefill) {
  const { layers, of } = prefill.progress.find((each) => each.rank === rank) ?? {};
  const is_done = prefill.done.includes(rank);
  const text = is_done ? "its part is done" : of ? `${count(layers)} of ${plural(of, "layer")}` : "no layer reported";
  const progress = make("progress", { max: 1, value: is_done ? 1 : of ? layers / of : 0, "aria-label": name });
  return make("div", { class: "bar" }, make("span", {}, name), progress, make("span", {}, text));
}

// The picture of the last long prompt.

function showLast({ last, ranks, tells_layers }) {
  const none = tells_layers
    ? "None yet. What takes less than half a second by prediction is not drawn."
    : "With decode=sharded or decode=auto the ranks do not tell when they were in which layer.";
  const took = last && `${plural(total(last.lengths), "token")} in ${seconds(last.elapsed_s)}`;
  const predicted = last && last.predicted_s ? `, predicted ${seconds(last.predicted_s)}` : "";
  say("last", last ? took + predicted : none);
  const width = find("skew").clientWidth;
  if (!last || drawn === `${last.number} ${width}`) return;
  drawn = `${last.number} ${width}`;
  const parts = last.parts.filter((part) => part.spans.length);
  const times = (part) => [begin(part), end(part), part.wait_s].map(seconds);
  fill("parts", parts.map((part) => [ranks[part.rank], count(part.tokens), ...times(part)]));
  find("legend").hidden = !parts.length;
  find("skew").replaceChildren(...(parts.length ? [picture(parts, width)] : []));
}

const begin = (part) => Math.min(...part.spans.map((span) => span[2]));
const end = (part) => Math.max(...part.spans.map((span) => span[3]));

function endOf(part, layer) {
  return Math.max(...part.spans.filter((span) => span[0] === "compute" && span[1] === layer).map((span) => span[3]));
}

function picture(parts, width) {
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
  const least = 10 ** Math.floor(Math.log10(all / 4));
  const step = [1, 2, 5, 10].map((each) => each * least).find((each) => all / each <= 5);
  for (let time = 0; time <= all; time += step) {
    const text = time ? `${Number(time.toPrecision(3))} s` : "0";
    svg.append(make("text", { x: x(time), y: bottom + 18, "text-anchor": "middle" }, text));
  }
  return svg;
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

// Questions.

async function ask(event) {
  event.preventDefault();
  const stop = new AbortController();
  const times = { began: performance.now(), first: null, last: null, tokens: 0, reason: "" };
  find("send").disabled = true;
  find("stop").disabled = false;
  find("stop").onclick = () => stop.abort();
  find("answer").replaceChildren();
  find("answer").setAttribute("aria-busy", "true"); // a reader hears it when it is whole
  say("times", "Sent");
  showRead({ processed: 0, total: 0, cache: 0 });
  try {
    for await (const line of lines(await send(find("question").value, stop.signal))) take(line, times);
    say("times", summary(times));
  } catch (error) {
    const known = { AbortError: "Stopped", TypeError: "The connection was lost" };
    say("times", known[error.name] ?? error.message);
  }
  find("send").disabled = false;
  find("stop").disabled = true;
  find("answer").setAttribute("aria-busy", "false");
}

async function send(question, signal) {
  const chats = shown === null || shown.chats;
  const asked = chats ? { messages: [{ role: "user", content: question }] } : { prompt: question };
  const how = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  const body = JSON.stringify({ ...asked, ...how, max_tokens: Number(find("most").value) });
  const headers = withKey({ "content-type": "application/json" });
  const address = chats ? "v1/chat/completions" : "v1/completions";
  const answer = await fetch(address, { method: "POST", headers, body, signal });
  if (answer.status === 401) lock();
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer.body.pipeThrough(new TextDecoderStream()).getReader();
}

async function* lines(reader) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    yield* parts;
  }
}

function take(line, times) {
  if (line.startsWith(": ") && times.first === null) say("times", `Sent: ${line.slice(": ".length)}`);
  if (!line.startsWith("data: {")) return;
  const chunk = JSON.parse(line.slice("data: ".length));
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.prompt_progress) return showRead(chunk.prompt_progress);
  if (chunk.usage) times.tokens = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    times.last = performance.now();
    times.first ??= times.last;
    times.reason = choice.finish_reason ?? times.reason;
    find("answer").append(choice.text ?? choice.delta.content ?? choice.delta.reasoning_content ?? "");
    say("times", `TTFT ${seconds((times.first - times.began) / 1000)}`);
  }
}

function showRead({ processed, total, cache }) {
  find("reading").hidden = !total;
  find("share").value = total ? processed / total : 0;
  say("read", `${count(processed)} of ${plural(total, "token")}${cache ? `, ${count(cache)} of them found` : ""}`);
}

function summary({ began, first, last, tokens, reason }) {
  if (first === null) return "No answer";
  const pace = tokens > 1 ? `, ${seconds((last - first) / 1000 / (tokens - 1))} per token` : "";
  const cut = reason === "length" ? ", the most allowed" : "";
  return `TTFT ${seconds((first - began) / 1000)}${pace}; ${plural(tokens, "token")}${cut}`;
}

// The key.

function withKey(headers = {}) {
  return key ? { ...headers, authorization: `Bearer ${key}` } : headers;
}

function lock() {
  say("about", "");
  say("trouble", key ? "The server does not know this key." : "");
  find("unlock").hidden = false;
  find("key").focus();
}

function unlock(event) {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  poll();
}

find("ask").addEventListener("submit", ask);
find("unlock").addEventListener("submit", unlock);
window.addEventListener("resize", () => shown && showLast(shown));
poll();
