// The state of the server, a question and its answer, and the key.

import { bytes, count, describe, fill, find, make, pace, plural, say, seconds, sentence, total } from "./elements.js";
import { begin, end, medians, requestsPlot, skew } from "./plots.js";

let key = ""; // of the API; it is kept here alone
let timer = 0;
let shown = null; // the last state of the server
let asking = null; // the question that is being answered
const drawn = {}; // what each picture shows, and how wide

// The state of the server.

async function poll() {
  if (!document.hidden) {
    const answer = await fetch("state", { headers: withKey(), cache: "no-store" }).catch(() => null);
    if (answer?.status === 401) return lock();
    const state = answer?.ok ? await answer.json().catch(() => null) : null;
    if (state) show(state);
    else say("trouble", answer ? await reasonOf(answer) : "The server does not answer.");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, 1000);
}

// Why the server refuses something, in its own words if it gives any.
async function reasonOf(answer) {
  const body = await answer.json().catch(() => null);
  if (body?.error?.message) return sentence(body.error.message);
  return `The server answers with status ${answer.status}${answer.statusText ? ` (${answer.statusText})` : ""}.`;
}

function show(state) {
  shown = state;
  const { limits, ranks, rows, waiting } = state;
  find("unlock").hidden = true;
  say("about", `${state.model} on ${plural(ranks.length, "rank")} (${state.device})`);
  say("trouble", state.refuses === null ? "" : `No more questions are taken: ${state.refuses}.`);
  describe("setup", setup(state));
  find("slower").replaceChildren(...state.slower.map((each) => make("li", {}, each)));
  find("is-slower").hidden = state.slower.length === 0;
  const most = limits.max_tokens === null ? "" : ` of at most ${count(limits.max_tokens)}`;
  const kept = Object.entries(state.prefixes).map(([tier, size]) => `${tier} ${bytes(size)}`);
  describe("facts", [
    ["Waiting", waiting.length ? `${plural(waiting.length, "request")}, ${plural(total(waiting), "token")}` : "none"],
    ["Answering", `${plural(rows.length, "row")} of at most ${count(limits.batch)}`],
    ["Room taken", `${plural(state.num_tokens, "token")}${most}`],
    ["Prefixes kept", kept.join(", ") || "none"],
    ["Decoding step", state.step_s ? seconds(state.step_s) : "not known yet"],
    ...stored(state),
  ]);
  find("prefills").replaceChildren(...state.prefills.map((each) => running(each, ranks)));
  fill("rows", rows.map((lengths) => lengths.map(count)));
  showLast(state);
  showRecent(state.recent);
  const tiers = ["weights", "live_kv", "prefill_kv", "host_kv", "peak"];
  fill("memory", state.memory.map((each) => [ranks[each.rank], ...tiers.map((tier) => bytes(each[tier]))]));
  find("no-memory").hidden = state.memory.length > 0;
}

function setup({ prefill, partition, policy, version, last }) {
  const lines = [["Prefill", prefill]];
  if (partition) {
    const ratios = partition.ratios ? ` ${partition.ratios.join(" : ")}` : "";
    const parts = (last?.parts ?? []).filter((part) => part.tokens), all = total(parts.map((part) => part.tokens));
    const shares = parts.map((part) => `${((100 * part.tokens) / all).toFixed(0)}%`);
    lines.push(["Partition", `${partition.name}${ratios}${parts.length > 1 ? `, last ${shares.join(" + ")}` : ""}`]);
  }
  if (policy) {
    const options = Object.entries(policy.options).map(([name, value]) => `, ${name} ${value}`);
    lines.push(["Policy", `${policy.name}${options.join("")}${policy.bits ? `, ${policy.bits} bits` : ""}`]);
  }
  return version ? [...lines, ["Version", version]] : lines;
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

// Draw a picture again only if it shows something else, or is of another width.
function draw(id, what, make) {
  const width = find(id).clientWidth;
  if (drawn[id] === `${what} ${width}`) return;
  drawn[id] = `${what} ${width}`;
  find(id).replaceChildren(...make(width));
}

function showLast({ last, ranks, tells_layers }) {
  const none = tells_layers
    ? "None yet. What takes less than half a second by prediction is not drawn."
    : "With decode=sharded or decode=auto the ranks do not tell when they were in which layer.";
  const took = last && `${plural(total(last.lengths), "token")} in ${seconds(last.elapsed_s)}`;
  const predicted = last && last.predicted_s ? `, predicted ${seconds(last.predicted_s)}` : "";
  say("last", last ? took + predicted : none);
  const parts = (last?.parts ?? []).filter((part) => part.spans.length);
  find("legend").hidden = !parts.length;
  draw("skew", last?.number, (width) => (parts.length ? [skew(parts, width)] : []));
  const times = (part) => [begin(part), end(part), part.wait_s].map(seconds);
  fill("parts", parts.map((part) => [ranks[part.rank], count(part.tokens), ...times(part)]));
}

function showRecent(recent) {
  const newest = recent.at(-1)?.ended_s;
  find("as-table").hidden = !recent.length;
  if (!recent.length) return;
  const crosses = recent.some((each) => each.ttft_s === null) ? " A cross has no answer." : "";
  const which = recent.length === 1 ? "One" : `${count(recent.length)}, the newest at the right`;
  say("recent", `${which}. Medians: ${medians(recent)}.${crosses}`);
  if (drawn.requests !== newest) fill("requests", [...recent].reverse().map(lineOf));
  drawn.requests = newest;
  draw("plot", newest, (width) => [requestsPlot(recent, width)]);
}

function lineOf({ ended_s, prompt_tokens, cached_tokens, new_tokens, ttft_s, tokens_per_s, how }) {
  const found = cached_tokens ? `${count(prompt_tokens)} (${count(cached_tokens)})` : count(prompt_tokens);
  const times = [ttft_s === null ? "none" : seconds(ttft_s), tokens_per_s === null ? "none" : pace(tokens_per_s)];
  return [new Date(1000 * ended_s).toLocaleTimeString("en-GB"), found, count(new_tokens), ...times, how];
}

// Questions. What is announced to a screen reader is the stage; the numbers beside it change several times a second.

async function ask(event) {
  event.preventDefault();
  if (asking !== null) return;
  asking = { began: performance.now(), first: null, last: null, tokens: 0, reason: "", stop: new AbortController() };
  find("answer").replaceChildren();
  find("answer").setAttribute("aria-busy", "true"); // a reader hears it when it is whole
  find("share").value = 0;
  find("reading").hidden = false;
  say("failure", "");
  enter("Sent");
  setBusy(true);
  const ticking = setInterval(tell, 250);
  try {
    for await (const line of lines(await send(find("question").value, asking))) take(line, asking);
    if (!asking.isWhole) throw new Error("The server has ended the answer before its end.");
    enter("Done");
  } catch (error) {
    enter(error.name === "AbortError" ? "Stopped" : "Failed");
    if (error.name !== "AbortError") say("failure", error.message);
  }
  clearInterval(ticking);
  asking = null;
  setBusy(false);
  find("answer").setAttribute("aria-busy", "false");
}

// Buttons that cannot be used now keep the focus, which a disabled one would lose.
function setBusy(isBusy) {
  find("send").setAttribute("aria-disabled", isBusy);
  find("stop").setAttribute("aria-disabled", !isBusy);
}

async function send(question, asked) {
  const chats = shown === null || shown.chats;
  const prompt = chats ? { messages: [{ role: "user", content: question }] } : { prompt: question };
  const options = { include_usage: true, continuous_usage_stats: true };
  const how = { stream: true, stream_options: options, return_progress: true };
  const body = JSON.stringify({ ...prompt, ...how, max_tokens: Number(find("most").value) });
  const headers = withKey({ "content-type": "application/json" });
  const address = chats ? "v1/chat/completions" : "v1/completions";
  const answer = await fetch(address, { method: "POST", headers, body, signal: asked.stop.signal }).catch(lost);
  if (answer.status === 401) lock();
  if (!answer.ok) throw new Error(await reasonOf(answer));
  asked.predicted = Number(answer.headers.get("x-predicted-ttft"));
  enter("Waiting");
  return answer.body.pipeThrough(new TextDecoderStream()).getReader();
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("The connection to the server is lost.");
}

async function* lines(reader) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    yield* parts;
  }
}

function take(line, asked) {
  if (line.startsWith(": waiting, ")) asked.before = line.slice(": waiting, ".length);
  if (line === "data: [DONE]") asked.isWhole = true;
  if (!line.startsWith("data: {")) return;
  const chunk = JSON.parse(line.slice("data: ".length));
  if (chunk.error) throw new Error(sentence(chunk.error.message));
  if (chunk.prompt_progress) return read(chunk.prompt_progress, asked);
  if (chunk.usage) asked.tokens = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    asked.last = performance.now();
    asked.first ??= asked.last;
    asked.reason = choice.finish_reason ?? asked.reason;
    find("answer").append(choice.text ?? choice.delta.content ?? choice.delta.reasoning_content ?? "");
    enter("Answering");
  }
}

function read(progress, asked) {
  asked.progress = progress;
  find("share").value = progress.total ? progress.processed / progress.total : 0;
  enter("Reading the prompt");
}

function enter(stage) {
  asking.stage = stage;
  say("stage", stage);
  tell();
}

// The numbers beside the stage.
function tell() {
  const { stage, began, first, before, progress, predicted, tokens, reason } = asking;
  find("share").hidden = first !== null || isOver(stage);
  const elapsed = (performance.now() - began) / 1000, told = [];
  if (progress && first === null) {
    const found = progress.cache ? ` (${count(progress.cache)} found)` : "";
    told.push(`${count(progress.processed)} of ${plural(progress.total, "token")}${found}`);
  }
  if (before && stage === "Waiting") told.push(before);
  if (first === null) {
    told.push(seconds(elapsed));
    if (predicted > elapsed && !isOver(stage)) told.push(`about ${seconds(predicted - elapsed)} left`);
  } else {
    told.push(`TTFT ${seconds((first - began) / 1000)}`, plural(tokens, "token"));
    const since = (asking.last - first) / 1000;
    if (tokens > 1 && since > 0) told.push(`${pace((tokens - 1) / since)} per s`);
    if (reason === "length") told.push("the most allowed");
  }
  say("times", told.join(", "));
}

const isOver = (stage) => ["Done", "Stopped", "Failed"].includes(stage);

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
find("ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
find("stop").addEventListener("click", () => asking?.stop.abort());
find("unlock").addEventListener("submit", unlock);
window.addEventListener("resize", () => shown && show(shown));
if (/Mac|iPhone|iPad/.test(navigator.platform)) say("keys", "⌘ + Enter");
poll();
