// The three moving drawings: the grid of devices, the walk of the tokens, the timeline. Each is made anew for a choice and
// hands back what can be moved; nothing here knows a formula.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(parent, name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function html(parent, name, attributes = {}, text = null) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function range([first, last]) {
  return first === last ? `${first}` : `${first}–${last}`;
}

// --- devices ----------------------------------------------------------------------------------------------------------

// Device i is the i-th of (pp, dp, ep), ep innermost, as moejax.mesh orders them.
function placeOf(index, choice) {
  const ep = index % choice.ep, dp = Math.floor(index / choice.ep) % choice.dp;
  return { pp: Math.floor(index / (choice.ep * choice.dp)), dp, ep };
}

function indexOf(place, choice) {
  return (place.pp * choice.dp + place.dp) * choice.ep + place.ep;
}

function drawDevices(root, choice, made, perNode, onChoose) {
  root.replaceChildren();
  const width = Math.max(200, root.clientWidth || 600);
  const side = Math.max(3, Math.min(22, Math.floor((width - 8) / choice.ep) - 1));
  const cells = [];
  for (const stage of made.layout.stages) {
    const figure = html(root, "figure", { class: "stage" });
    const caption = html(figure, "figcaption");
    html(caption, "b", {}, choice.pp > 1 ? `stage ${stage.index}` : "all layers");
    const ends = [stage.embedding ? "embedding" : "", stage.head ? "head" : ""].filter(Boolean).join(", ");
    caption.append(` layers ${stage.chunks.map(range).join(", ")}${ends ? ` · ${ends}` : ""}`);
    const pitch = side + 1 + (side > 8 ? 2 : 0);
    const drawing = svg(figure, "svg", { width: choice.ep * pitch, height: choice.dp * pitch });
    for (let dp = 0; dp < choice.dp; dp++)
      for (let ep = 0; ep < choice.ep; ep++) {
        const index = indexOf({ pp: stage.index, dp, ep }, choice);
        const cell = svg(drawing, "rect", { x: ep * pitch, y: dp * pitch, width: side, height: side, rx: side > 8 ? 3 : 1 });
        cell.addEventListener("click", () => onChoose(index));
        cells[index] = cell;
      }
  }
  return (chosen) => {
    const me = placeOf(chosen, choice);
    cells.forEach((cell, index) => {
      const it = placeOf(index, choice);
      const near = Math.abs(it.pp - me.pp) === 1 || (made.schedule.chunks > 1 && Math.abs(it.pp - me.pp) === choice.pp - 1);
      const kind = index === chosen ? "me" : it.pp === me.pp && it.dp === me.dp ? "ep"
        : it.pp === me.pp && it.ep === me.ep ? "dp" : it.dp === me.dp && it.ep === me.ep && near ? "pp" : "";
      cell.setAttribute("class", `gpu ${Math.floor(index / perNode) % 2 ? "odd" : ""} ${kind}`);
    });
  };
}

// --- tokens -----------------------------------------------------------------------------------------------------------

// Part of all routes that each expert gets, summing to one. A token's K experts differ, so none gets more than 1/K.
function loadOf(routing, experts, topK) {
  if (routing === "collapsed") return Array.from({ length: experts }, (_, i) => (i < topK ? 1 / topK : 0));
  if (routing === "balanced") return Array(experts).fill(1 / experts);
  const random = numbers(7), order = Array.from({ length: experts }, (_, i) => i);
  for (let i = experts - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  let load = order.map((rank) => 1 / (rank + 1));
  for (let turn = 0; turn < 20; turn++) {
    const total = load.reduce((a, b) => a + b, 0);
    load = load.map((x) => Math.min(x / total, 1 / topK));
  }
  return load;
}

function numbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function chooseExperts(load, topK, random) {
  const keys = load.map((x, i) => [x > 0 ? Math.log(x) - Math.log(-Math.log(random())) : -Infinity, i]);
  return keys.sort((a, b) => b[0] - a[0]).slice(0, topK).map(([, i]) => i);
}

// Draws devices, their tokens and some experts; returns move(phase, progress) and what is drawn. phase: 0 at home, 1 at the
// router, 2 dispatch, 3 at the experts, 4 combine.
function drawWalk(root, report, choice) {
  root.replaceChildren();
  const m = report.model, shown = Math.min(choice.ep, 8), here = Math.min(m.num_experts / choice.ep, 4);
  const topK = Math.min(m.top_k, 4), perDevice = 4, width = 960, gap = 14;
  const column = (width - gap * (shown + 1)) / shown, left = (d) => gap + d * (column + gap);
  root.setAttribute("viewBox", `0 0 ${width} 372`);
  const drawn = shown * here, load = loadOf(choice.routing, drawn, Math.min(topK, drawn)), random = numbers(11);
  const roads = svg(root, "g"), bars = [], experts = [];
  for (let d = 0; d < shown; d++) {
    svg(root, "rect", { x: left(d), y: 22, width: column, height: 96, rx: 8, class: "box" });
    svg(root, "text", { x: left(d) + 8, y: 15, class: "soft" }, `device ${d}`);
    svg(root, "text", { x: left(d) + 8, y: 112, class: "soft" }, "router");
    svg(root, "rect", { x: left(d), y: 246, width: column, height: 104, rx: 8, class: "box" });
    const e = (column - 8 - 6 * (here - 1)) / here;
    for (let i = 0; i < here; i++) {
      const x = left(d) + 4 + i * (e + 6), id = d * here + i;
      svg(root, "rect", { x, y: 252, width: e, height: 92, rx: 5, class: "expert" });
      bars.push(svg(root, "rect", { x, y: 344, width: e, height: 0, rx: 5, class: "load" }));
      experts.push({ x: x + e / 2, width: e, count: 0 });
      if (e > 16) svg(root, "text", { x: x + e / 2, y: 366, "text-anchor": "middle", class: "soft" }, `${d * (m.num_experts / choice.ep) + i}`);
      else if (i === 0 && id === 0) svg(root, "text", { x, y: 366, class: "soft" }, "experts");
    }
  }
  const dots = [];
  for (let d = 0; d < shown; d++)
    for (let t = 0; t < perDevice; t++) {
      const chosen = chooseExperts(load, Math.min(topK, drawn), random);
      const x = left(d) + (column * (t + 1)) / (perDevice + 1);
      chosen.forEach((e, k) => {
        const place = experts[e].count++;
        dots.push({ x, y: 46, e, place, k, d });
      });
    }
  for (const dot of dots) {
    const expert = experts[dot.e], perRow = Math.max(1, Math.floor(expert.width / 11));
    dot.toX = expert.x + ((dot.place % perRow) - (Math.min(perRow, expert.count) - 1) / 2) * 11;
    dot.toY = Math.max(258, 336 - Math.floor(dot.place / perRow) * 11);
    svg(roads, "path", { class: "road", d: `M${dot.x} 84 C${dot.x} 170 ${dot.toX} 165 ${dot.toX} 250` });
    dot.circle = svg(root, "circle", { r: 5, style: `fill:var(--m${dot.d % 8})`, stroke: "var(--card)" });
  }
  const largest = Math.max(...experts.map((e) => e.count), 1);
  const ease = (p) => (p < 0.5 ? 2 * p * p : 1 - 2 * (1 - p) * (1 - p));
  return (phase, progress) => {
    const p = ease(Math.min(1, Math.max(0, progress)));
    roads.style.display = phase >= 1 && phase <= 4 ? "" : "none";
    for (const dot of dots) {
      const spread = (dot.k - (topK - 1) / 2) * 6;
      const home = [dot.x, 46], router = [dot.x + spread, 84], there = [dot.toX, dot.toY];
      const [from, to] = [[home, home], [home, router], [router, there], [there, there], [there, home]][phase];
      const bend = phase === 2 || phase === 4 ? Math.sin(Math.PI * p) * (to[0] - from[0]) * 0.12 : 0;
      dot.circle.setAttribute("cx", from[0] + (to[0] - from[0]) * p + bend);
      dot.circle.setAttribute("cy", from[1] + (to[1] - from[1]) * p);
    }
    const full = phase === 3 ? p : phase === 4 ? 1 - p : 0;
    bars.forEach((bar, i) => {
      const height = (92 * experts[i].count * full) / largest;
      bar.setAttribute("height", height);
      bar.setAttribute("y", 344 - height);
    });
  };
}

// --- timeline ---------------------------------------------------------------------------------------------------------

const OP_NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

function drawTimeline(root, schedule) {
  root.replaceChildren();
  const cell = Math.max(9, Math.min(24, Math.floor(1080 / schedule.ticks))), high = 24, left = 62;
  const width = left + schedule.ticks * cell + 4, height = schedule.stages * (high + 4) + 20;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("width", width);
  root.setAttribute("height", height);
  const columns = Array.from({ length: schedule.ticks }, () => []);
  for (let s = 0; s < schedule.stages; s++) {
    svg(root, "text", { x: 0, y: s * (high + 4) + 17, class: "soft" }, `stage ${s}`);
    for (let t = 0; t < schedule.ticks; t++) {
      const here = schedule.table[t][s];
      if (!here) continue;
      const group = svg(root, "g");
      svg(group, "rect", {
        x: left + t * cell, y: s * (high + 4), width: cell - 1, height: high, rx: 3,
        class: `op-${here.op} ${here.chunk % 2 ? "second" : ""}`,
      });
      if (cell >= 15) svg(group, "text", { x: left + t * cell + (cell - 1) / 2, y: s * (high + 4) + 16, "text-anchor": "middle", class: "in" }, `${here.m}`);
      columns[t].push(group);
    }
  }
  const now = svg(root, "rect", { y: 0, width: cell, height: schedule.stages * (high + 4) - 3, rx: 3, class: "now" });
  svg(root, "text", { x: left, y: height - 5, class: "soft" }, "time →");
  return {
    x: (tick) => left + tick * cell,
    show(tick) {
      columns.forEach((groups, t) => groups.forEach((group) => group.setAttribute("class", t > tick ? "later" : "")));
      now.setAttribute("x", left + tick * cell - 0.5);
    },
  };
}
