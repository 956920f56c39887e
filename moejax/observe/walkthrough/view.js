// What is chosen, and everything on the page that follows from it.
"use strict";

const byId = (id) => document.getElementById(id);
const QUIET = matchMedia("(prefers-reduced-motion: reduce)");
const COLOURS = ["--m0", "--m1", "--m2", "--m3", "--m4", "--m5", "--m6", "--m7"];
const CATEGORIES = {
  weights: "working weights of this stage",
  master: "fp32 master copy, this device's part of it",
  moments: "two fp32 moments of Adam, this device's part",
  gradients: "fp32 sums of the stage's gradients",
  stash: "microbatches under way: stage inputs and cotangents",
  saved: "what one forward keeps for its backward",
  dispatch: "token rows on their way to experts and in front of them",
  temporaries: "one block's backward, logits, and whatever lives for a moment",
};
const PHASES = ["At home", "Router", "Dispatch", "Experts", "Combine"];

const state = { choice: null, made: null, device: 0, phase: 0, walk: null, timeline: null, drawn: null, timers: {} };

function own() {
  const s = REPORT.settings;  // a table of one's own has no name here: 1F1B stands for it
  if (!SCHEDULES.includes(s.schedule)) [s.schedule, s.chunks] = ["1f1b", 1];
  return { dp: s.dp, ep: s.ep, pp: s.pp, schedule: s.schedule, microbatches: s.microbatches, routing: "balanced" };
}

function bytes(value) {
  const units = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const [size, unit] = units.find(([size]) => value >= size) ?? [1, "B"];
  return `${(value / size).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
}

function seconds(value) {
  if (value >= 1) return `${value.toPrecision(3)} s`;
  return value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} µs`;
}

const count = (value) => Math.round(value).toLocaleString("en");
const large = (n) => (n >= 1e12 ? `${(n / 1e12).toPrecision(3)}T` : n >= 1e9 ? `${(n / 1e9).toPrecision(3)}B` : `${(n / 1e6).toPrecision(3)}M`);

// --- controls ---------------------------------------------------------------------------------------------------------

function fill(id, values, value) {
  const select = byId(id);
  select.replaceChildren();
  for (const [key, text] of values) html(select, "option", { value: key }, text);
  select.value = value;
}

function powers(most, also) {
  const found = new Set([also]);
  for (let n = 1; n <= most; n *= 2) found.add(n);
  return [...found].sort((a, b) => a - b).map((n) => [n, `${n}`]);
}

function fillControls(choice) {
  fill("dp", powers(128, REPORT.settings.dp), choice.dp);
  fill("ep", powers(Math.min(64, REPORT.model.num_experts), REPORT.settings.ep), choice.ep);
  fill("pp", powers(Math.min(32, REPORT.model.n_layers), REPORT.settings.pp), choice.pp);
  fill("schedule", SCHEDULES.map((name) => [name, name.replaceAll("_", " ")]), choice.schedule);
  fill("microbatches", powers(1024, REPORT.settings.microbatches), choice.microbatches);
  fill("routing", [["balanced", "balanced"], ["zipf", "uneven (rank⁻¹)"], ["collapsed", "collapsed onto K"]], choice.routing);
}

function read() {
  const number = (id) => Number(byId(id).value);
  return {
    dp: number("dp"), ep: number("ep"), pp: number("pp"), microbatches: number("microbatches"),
    schedule: byId("schedule").value, routing: byId("routing").value,
  };
}

function update(choice) {
  stop("walk");
  stop("timeline");
  const made = compute(REPORT, choice), status = byId("status");
  status.className = made.problem ? "bad" : "";
  byId("main").style.opacity = made.problem ? 0.4 : 1;
  if (made.problem) {
    status.textContent = `dp=${choice.dp}, ep=${choice.ep}, pp=${choice.pp}: ${made.problem}`;
    return;
  }
  Object.assign(state, { choice, made, device: Math.min(state.device, made.devices - 1), phase: 0 });
  const spare = REPORT.machine.usable_bytes - made.total, gpu = REPORT.machine.gpu.toUpperCase();
  status.textContent =
    `${count(made.devices)} × ${gpu}, ${count(made.tokens)} tokens of a microbatch on each: ${bytes(made.total)} of ` +
    `${bytes(REPORT.machine.memory_bytes)}, ` + (spare >= 0 ? `fits with ${bytes(spare)} to spare` : `${bytes(-spare)} too much`) + ` (by ${made.source}).`;
  status.className = spare >= 0 ? "" : "bad";
  showDevices();
  showWalk();
  showTimeline();
  showTraffic();
  showMemory();
}

// --- sections ---------------------------------------------------------------------------------------------------------

function legend(id, rows) {
  byId(id).replaceChildren();
  for (const [colour, text] of rows) {
    const item = html(byId(id), "li");
    html(item, "span", { class: "key", style: `background:var(${colour})` });
    item.append(text);
  }
}

function showDevices() {
  const paint = drawDevices(byId("devices"), state.choice, state.made, REPORT.machine.gpus_per_node, choose);
  state.paint = paint;
  legend("legend-devices", [["--ink", "the chosen device"], ["--ep", "its expert-parallel group (ep)"],
    ["--dp", "the same experts, other tokens (dp)"], ["--pp", "its neighbours in the pipeline (pp)"],
    ["--cell", "others, shaded by node"]]);
  choose(state.device);
}

function choose(index) {
  state.device = index;
  state.paint(index);
  const { choice, made } = state, place = placeOf(index, choice), stage = made.layout.stages[place.pp];
  const each = REPORT.model.num_experts / choice.ep, box = byId("device");
  box.replaceChildren();
  html(box, "h3", {}, `Device ${index}`);
  const list = html(box, "dl"), row = (term, text) => { html(list, "dt", {}, term); html(list, "dd", {}, text); };
  row("place", `pp ${place.pp}, dp ${place.dp}, ep ${place.ep}; node ${Math.floor(index / REPORT.machine.gpus_per_node)}`);
  row("layers", stage.chunks.map(range).join(" and ") + ` (${stage.dense} dense, ${stage.moe} with experts)`);
  if (stage.moe) row("experts of each of them", `${range([place.ep * each, place.ep * each + each - 1])} of ${REPORT.model.num_experts}`);
  const ends = [stage.embedding ? "the embedding" : "", stage.head ? "head and loss" : ""].filter(Boolean);
  if (ends.length) row("and", ends.join(", "));
  const of = (axis) => made.collectives.filter((c) => c.axes.includes(axis)).reduce((a, c) => a + c.bytes, 0);
  if (choice.ep > 1) row("over ep, with " + (choice.ep - 1) + " others", `token rows, ${bytes(made.collectives.filter((c) => c.axes.join() === "ep" && c.purpose.startsWith("dispatch")).reduce((a, c) => a + c.bytes, 0))} a step`);
  if (choice.dp > 1 || choice.ep > 1) row("with its replicas", `gradients and weights, ${bytes(made.collectives.filter((c) => /^(gradients|weights)/.test(c.purpose)).reduce((a, c) => a + c.bytes, 0))} a step`);
  if (choice.pp > 1) row("with its pipeline neighbours", `activations and their gradients, ${bytes(made.collectives.filter((c) => c.purpose === "between stages").reduce((a, c) => a + c.bytes, 0))} a step`);
  if (choice.pp > 1 && of("pp") === 0) row("pipeline", "nothing");
}

function moveDevice(event) {
  const step = { ArrowLeft: ["ep", -1], ArrowRight: ["ep", 1], ArrowUp: ["dp", -1], ArrowDown: ["dp", 1], PageUp: ["pp", -1], PageDown: ["pp", 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const place = placeOf(state.device, state.choice), [axis, by] = step;
  place[axis] += by;
  if (axis === "dp" && (place.dp < 0 || place.dp >= state.choice.dp)) {  // over the edge into the next stage
    place.pp += by;
    place.dp = by > 0 ? 0 : state.choice.dp - 1;
  }
  const fits = ["pp", "dp", "ep"].every((name) => place[name] >= 0 && place[name] < state.choice[name]);
  if (fits) choose(indexOf(place, state.choice));
}

function routingFacts() {
  const { choice, made } = state, m = REPORT.model;
  const load = loadOf(choice.routing, m.num_experts, m.top_k), each = m.num_experts / choice.ep;
  const perDevice = Array.from({ length: choice.ep }, (_, d) => load.slice(d * each, (d + 1) * each).reduce((a, b) => a + b, 0));
  const arriving = made.tokens * m.top_k * choice.ep * Math.max(...perDevice);
  return { arriving, mean: made.tokens * m.top_k, rounds: Math.max(1, Math.ceil(arriving / made.rows - 1e-9)),
    expert: Math.max(...load) * m.num_experts };
}

function showWalk() {
  const { choice, made } = state, m = REPORT.model, facts = routingFacts();
  byId("walk-lead").textContent = choice.ep === 1
    ? `With ep=1 every device has all ${m.num_experts} experts, and no token leaves it.`
    : `One row of the grid: ${choice.ep > 8 ? "the first 8 of " : ""}${choice.ep} devices with ${m.num_experts / choice.ep} of ` +
      `${m.num_experts} experts each. Every token goes to ${m.top_k}, by transport ${made.exchange.name}; four tokens a device are ` +
      `drawn, of ${count(made.tokens)}.`;
  state.walk = drawWalk(byId("walk"), REPORT, choice);
  const hop = made.exchange.hops.reduce((a, h) => a + h.bytes, 0) / 2;
  const box = byId("walk-facts");
  box.replaceChildren();
  const fact = (value, text) => { const d = html(box, "div"); html(d, "b", {}, value); html(d, "span", {}, text); };
  fact(choice.ep === 1 ? "nothing" : bytes(hop), "leaves each device for a dispatch, as much comes back");
  fact(count(facts.arriving), `rows for the fullest device, ${(facts.arriving / facts.mean).toPrecision(3)} × the mean`);
  fact(count(made.rows), "rows fit into a receive buffer");
  fact(`${facts.rounds}`, facts.rounds === 1 ? "round: everything arrives at once" : "rounds: what overflows comes again, no token is dropped");
  fact(`${facts.expert.toPrecision(3)} ×`, "the mean load has the fullest expert");
  walkTo(0, 1);
}

function walkText(phase) {
  const m = REPORT.model, made = state.made;
  return [
    `${count(made.tokens)} tokens a device, each a row of ${count(m.d_model)} numbers.`,
    `A small product gives each token a score for all ${m.num_experts} experts; the best ${m.top_k} are chosen, with weights.`,
    state.choice.ep === 1 ? "The rows are sorted by expert; nothing is sent." : "Each row goes straight to its place in front of its expert, on whichever device that is.",
    `Each expert multiplies the rows in front of it: ${count(m.d_model)} → 2 × ${count(m.hidden)} → ${count(m.d_model)}, one grouped product a device.`,
    "The rows come back the same way and are summed by their weights. Backward takes the same roads for gradients.",
  ][phase];
}

function walkTo(phase, progress) {
  state.phase = phase;
  state.walk(phase, progress);
  const text = `${PHASES[phase]}. ${walkText(phase)}`;
  if (byId("walk-text").textContent !== text) byId("walk-text").textContent = text;
  byId("walk").dataset.phase = phase;
}

function showTimeline() {
  const { choice, made } = state, pp = choice.pp;
  const most = Math.max(2, Math.min(choice.microbatches, Math.max(8, 3 * pp), Math.ceil(400 / pp)));
  const part = Math.min(choice.microbatches, most);
  state.drawn = part === choice.microbatches ? made.schedule : makeSchedule(choice.schedule, pp, part, made.schedule.chunks);
  byId("timeline-lead").textContent = pp === 1
    ? "Without stages there is no pipeline: microbatches run one after the other and their gradients add up."
    : `${pp} stages, ${choice.microbatches} microbatches: ${(100 * made.bubble).toFixed(1)}% of the step stages wait (a backward ` +
      `counted as two forwards, all stages in step).` + (part < choice.microbatches ? ` Drawn is the same schedule with ${part}.` : "");
  state.timeline = drawTimeline(byId("timeline"), state.drawn);
  const ops = new Set(state.drawn.table.flat().filter(Boolean).map((cell) => cell.op));
  const names = [...ops].map((op) => [`--${op.toLowerCase()}`, OP_NAMES[op]]);
  legend("legend-timeline", [...names, ...(made.schedule.chunks > 1 ? [["--cell", "paler: the stage's second chunk of layers"]] : [])]);
  byId("tick").max = state.drawn.ticks - 1;
  byId("tick").value = state.drawn.ticks - 1;
  tickTo(state.drawn.ticks - 1);
}

function tickTo(tick) {
  state.timeline.show(tick);
  const row = state.drawn.table[tick], busy = row.filter(Boolean).length;
  const parts = row.map((cell, s) => cell && `${s}: ${OP_NAMES[cell.op]} of ${cell.m}`).filter(Boolean);
  byId("tick-text").textContent = `Tick ${tick}, ${busy} of ${row.length} stages at work. ${parts.slice(0, 4).join("; ")}${parts.length > 4 ? "; ..." : ""}`;
}

function showTraffic() {
  const body = document.querySelector("#traffic tbody");
  body.replaceChildren();
  const rows = [...state.made.collectives].sort((a, b) => b.bytes - a.bytes), most = rows.length ? rows[0].bytes : 1;
  for (const c of rows) {
    const row = html(body, "tr");
    const what = html(row, "td", {}, c.purpose);
    what.append(document.createElement("br"));
    html(what, "small", {}, c.kind);
    const along = html(row, "td");
    for (const axis of c.axes) html(along, "span", { class: `tag ${axis}` }, axis);
    html(row, "td", {}, c.link);
    html(row, "td", { class: "n" }, count(c.count));
    html(row, "td", { class: "n" }, bytes(c.bytes));
    html(row, "td", { class: "n" }, seconds(c.bytes / REPORT.machine[`${c.link}_bytes_per_second`]));
    html(html(row, "td", { class: "wide" }), "div", { class: "meter", style: `width:${(100 * c.bytes) / most}%` });
  }
  if (!rows.length) html(html(body, "tr"), "td", { colspan: 7 }, "One device, and nobody to talk to.");
}

function showMemory() {
  const { made } = state, machine = REPORT.machine, scale = Math.max(machine.memory_bytes, made.total);
  const bar = byId("memory-bar"), body = document.querySelector("#memory tbody");
  bar.replaceChildren();
  body.replaceChildren();
  byId("memory-lead").textContent = `${bytes(made.total)} at the peak; a program gets ${bytes(machine.usable_bytes)} of the card's ${bytes(machine.memory_bytes)}.`;
  bar.setAttribute("aria-label", byId("memory-lead").textContent);
  Object.entries(made.categories).forEach(([name, value], i) => {
    html(bar, "i", { style: `width:${(100 * value) / scale}%;background:var(${COLOURS[i]})`, title: `${name}: ${bytes(value)}` });
    const row = html(body, "tr"), first = html(row, "td");
    html(first, "span", { class: "key", style: `background:var(${COLOURS[i]})` });
    first.append(name);
    html(row, "td", {}, CATEGORIES[name]);
    html(row, "td", { class: "n" }, bytes(value));
    html(row, "td", { class: "n" }, `${((100 * value) / made.total).toFixed(1)}%`);
  });
  const mark = html(bar, "div", { class: "mark", style: `left:${(100 * machine.usable_bytes) / scale}%` });
  html(mark, "span", {}, `usable ${bytes(machine.usable_bytes)}`);
}

// --- motion -----------------------------------------------------------------------------------------------------------

function stop(name) {
  cancelAnimationFrame(state.timers[name]);
  delete state.timers[name];
  byId(`${name}-play`).textContent = "Play";
  byId(`${name}-play`).setAttribute("aria-pressed", "false");
}

// frame(seconds since the start) -> whether to go on
function play(name, frame) {
  if (state.timers[name] !== undefined) return stop(name);
  byId(`${name}-play`).textContent = "Pause";
  byId(`${name}-play`).setAttribute("aria-pressed", "true");
  let begin = null;
  const next = (now) => {
    begin ??= now;
    if (!frame((now - begin) / 1000)) return stop(name);
    state.timers[name] = requestAnimationFrame(next);
  };
  state.timers[name] = requestAnimationFrame(next);
}

const LASTING = [0.8, 1.2, 2.4, 1.8, 2.4]; // seconds of each phase

function playWalk() {
  if (QUIET.matches) return walkTo((state.phase + 1) % PHASES.length, 1);
  const first = (state.phase + 1) % PHASES.length;
  play("walk", (time) => {
    let phase = first;
    while (time > LASTING[phase]) {
      time -= LASTING[phase];
      phase = (phase + 1) % PHASES.length;
    }
    walkTo(phase, time / LASTING[phase]);
    return true;
  });
}

function playTimeline() {
  const last = state.drawn.ticks - 1, start = Number(byId("tick").value) >= last ? 0 : Number(byId("tick").value);
  const pace = QUIET.matches ? 2 : Math.max(4, last / 14); // ticks a second
  play("timeline", (time) => {
    const tick = Math.min(last, start + Math.floor(time * pace));
    byId("tick").value = tick;
    tickTo(tick);
    const box = byId("timeline-scroll"), x = state.timeline.x(tick);
    if (x > box.scrollLeft + box.clientWidth - 40 || x < box.scrollLeft) box.scrollLeft = x - 80;
    return tick < last;
  });
}

// --- the beginning ----------------------------------------------------------------------------------------------------

function begin() {
  const m = REPORT.model, v = REPORT.verdict;
  document.title = `${m.name}: moejax plan`;
  byId("title").textContent = m.name;
  byId("facts").textContent =
    `${large(m.parameters_total)} parameters, ${large(m.parameters_active)} at work for each token; ${m.n_layers} layers, ` +
    `${m.num_experts} experts, ${m.top_k} a token; ${large(REPORT.settings.batch_tokens)} tokens a step.`;
  byId("verdict").textContent = v.sentence;
  byId("verdict").classList.toggle("bad", !v.fits);
  const notes = [
    `The plan was made by ${REPORT.source === "compiled" ? "compiling the step" : "formulas"}, for dp=${REPORT.settings.dp}, ` +
      `ep=${REPORT.settings.ep}, pp=${REPORT.settings.pp}; it estimates ${count(REPORT.time.tokens_per_second_per_gpu)} tokens/s a GPU ` +
      `(${(100 * REPORT.time.mfu).toFixed(0)}% of the peak). For another mesh this page computes memory and bytes by the formulas ` +
      "of python -m moejax.plan --quick; saved and temporaries are scaled from the plan.",
    "Uneven and collapsed routing show loads; bytes in the table are those of even ones.",
    `${REPORT.machine.gpu.toUpperCase()}: ${REPORT.machine.source}.`,
    ...REPORT.time.assumptions, ...REPORT.notes,
  ];
  for (const note of notes) html(byId("notes"), "li", {}, note);
  fillControls(own());
  byId("controls").addEventListener("change", () => update(read()));
  byId("controls").addEventListener("reset", (event) => { event.preventDefault(); fillControls(own()); update(own()); });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("devices").addEventListener("keydown", moveDevice);
  byId("walk-play").addEventListener("click", playWalk);
  byId("walk-step").addEventListener("click", () => { stop("walk"); walkTo((state.phase + 1) % PHASES.length, 1); });
  byId("timeline-play").addEventListener("click", playTimeline);
  byId("tick").addEventListener("input", () => { stop("timeline"); tickTo(Number(byId("tick").value)); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width && state.made) { width = innerWidth; showDevices(); } });
  update(own());
}

begin();
