// What a mesh means for memory and traffic: the quick formulas of moejax/planning (weights.py, memory.py,
// collectives.py), for the model of the embedded plan. What those formulas fit rather than count, what a block keeps and
// what lives for a moment, is taken from the plan and scaled with the layers of a stage and the tokens of a device.
"use strict";

const BYTES = { bfloat16: 2, float32: 4 };
const FP32 = 4;
const MX_BYTES = 1 + 1 / 32; // of a number in MXFP8, with its share of a scale
const RAGGED_DEVICES = 32; // what XLA's ragged all-to-all serves

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}

// Layers of each virtual stage as [first, last], the longer ones first.
function layersOf(layers, virtual) {
  const base = Math.floor(layers / virtual), extra = layers % virtual, found = [];
  for (let q = 0, begin = 0; q < virtual; q++) {
    const count = base + (q < extra ? 1 : 0);
    found.push([begin, begin + count - 1]);
    begin += count;
  }
  return found;
}

// What each stage holds, and the slots of each kind of block that every stage has room for.
function stagesOf(model, schedule) {
  const layers = layersOf(model.n_layers, schedule.virtual);
  const stages = Array.from({ length: schedule.stages }, (_, index) => {
    const virtual = Array.from({ length: schedule.chunks }, (_, chunk) => schedule.virtualStage(index, chunk));
    const chunks = virtual.map((q) => layers[q]);
    const all = sum(chunks.map(([a, b]) => b - a + 1));
    const dense = sum(chunks.map(([a, b]) => Math.max(0, Math.min(b + 1, model.n_dense_layers) - a)));
    return {
      index, chunks, dense, moe: all - dense,
      embedding: virtual.includes(0), head: virtual.includes(schedule.virtual - 1),
    };
  });
  const slots = { dense: Math.max(...stages.map((s) => s.dense)), moe: Math.max(...stages.map((s) => s.moe)) };
  const chunk = (kind) => Math.max(...layers.map(([a, b]) => {
    const dense = Math.max(0, Math.min(b + 1, model.n_dense_layers) - a);
    return kind === "dense" ? dense : b - a + 1 - dense;
  }));
  return { stages, slots, fullest: { dense: chunk("dense"), moe: chunk("moe") } };
}

// Weights of one block by part, from the totals of the plan, whose blocks of a kind are all alike.
function perBlock(model) {
  const p = model.parameters, moeLayers = model.n_layers - model.n_dense_layers;
  const ends = p.embedding + p.head;
  const endNorms = model.d_model * (model.end_norms ?? 2);
  const common = (p.attention + p.norms - endNorms) / model.n_layers;
  return {
    experts: moeLayers ? (p.experts + p.idle_experts) / moeLayers : 0,
    moe: common + (moeLayers ? (p.router + p.shared) / moeLayers : 0),
    dense: common + (model.n_dense_layers ? p.dense / model.n_dense_layers : 0),
    ends: ends + endNorms,
  };
}

// Chunks of layers on a stage: the plan's own for its own schedule, else what the schedule usually has.
function chunksFor(report, choice) {
  if (choice.pp === 1) return 1;
  return choice.schedule === report.settings.schedule ? report.settings.chunks : chunksOf(choice.schedule);
}

function whyNot(report, choice) {
  const m = report.model, devices = choice.dp * choice.ep * choice.pp;
  const sequences = report.settings.batch_tokens / m.sequence_length;
  if (m.num_experts % choice.ep) return `ep=${choice.ep} does not divide the ${m.num_experts} experts.`;
  const virtual = choice.pp * chunksFor(report, choice);
  if (virtual > m.n_layers) return `${virtual} virtual stages are more than the ${m.n_layers} layers.`;
  if (sequences % (choice.microbatches * choice.dp * choice.ep))
    return `The ${sequences} sequences of a step do not divide into ${choice.microbatches} microbatches over dp·ep=` +
      `${choice.dp * choice.ep} devices; take fewer microbatches.`;
  if (devices > 8192) return "More than 8,192 devices do not fit on this page.";
  return null;
}

// The transport that `auto` takes, and the bytes that leave a device for one dispatch and one combine.
function exchangeOf(report, choice, tokens, item) {
  const m = report.model, node = report.machine.gpus_per_node;
  const rows = tokens * m.top_k, size = rows * m.d_model * item, ep = choice.ep;
  if (ep === 1) return { name: "local", hops: [] };
  const nodes = ep / node;
  if (ep % node === 0 && nodes >= 2 && Math.max(nodes, node) <= RAGGED_DEVICES)
    return { name: "hierarchical", hops: [
      { kind: "ragged-all-to-all", link: "nvlink", bytes: (2 * size * (node - 1)) / node },
      { kind: "ragged-all-to-all", link: "network", bytes: (2 * size * (nodes - 1)) / nodes }] };
  const link = ep <= node ? "nvlink" : "network";
  if (ep <= RAGGED_DEVICES)
    return { name: "rowwise", hops: [{ kind: "ragged-all-to-all", link, bytes: (2 * size * (ep - 1)) / ep }] };
  return { name: "all_to_all", hops: [{ kind: "all-to-all", link, bytes: (2 * size * (ep - 1)) / ep }] };
}

function runsOf(report, op, last) {
  const rerun = report.settings.stash === "inputs" ? 1 : 0, again = report.settings.recompute === "none" ? 0 : 1;
  if (op === "F") return last && rerun ? [0, 0] : [1, 0];
  if (op === "B" || op === "I") return [rerun + again, 1];
  return rerun ? [rerun + again, 1] : [0, 0];
}

// Forward and backward exchanges of the busiest stage in a step: MoE layers times runs.
function exchangeRuns(report, schedule, keepInputs) {
  const settings = { ...report.settings, stash: keepInputs ? "inputs" : "residuals" };
  const layers = layersOf(report.model.n_layers, schedule.virtual);
  const counts = Array.from({ length: schedule.stages }, () => [0, 0]);
  for (const row of schedule.table)
    row.forEach((cell, s) => {
      if (!cell) return;
      const q = schedule.virtualStage(s, cell.chunk), [a, b] = layers[q];
      const moe = b - a + 1 - Math.max(0, Math.min(b + 1, report.model.n_dense_layers) - a);
      const [forward, backward] = runsOf({ settings }, cell.op, q === schedule.virtual - 1);
      counts[s][0] += moe * forward;
      counts[s][1] += moe * backward;
    });
  return counts.reduce((most, now) => (sum(now) > sum(most) ? now : most));
}

// Whether this is what the plan itself was made for: then its own figures are shown, compiled ones if it has them.
function isOwn(report, choice) {
  const s = report.settings;
  return ["dp", "ep", "pp", "schedule", "microbatches"].every((name) => choice[name] === s[name]);
}

// Everything the page shows for a choice; own: false asks for the formulas even where the plan has figures.
function compute(report, choice, own = true) {
  const problem = whyNot(report, choice);
  if (problem) return { problem };
  const m = report.model, s = report.settings;
  const schedule = makeSchedule(choice.schedule, choice.pp, choice.microbatches, chunksFor(report, choice));
  const layout = stagesOf(m, schedule), then = report.baseline ?? (report.baseline = baselineOf(report));
  const shards = choice.dp * choice.ep, devices = shards * choice.pp;
  const tokens = s.batch_tokens / choice.microbatches / shards;
  const item = BYTES[s.compute_dtype], param = BYTES[s.params_dtype];
  const ends = s.ends === "sharded" && choice.pp > 1;
  if (ends) for (const stage of layout.stages) stage.embedding = stage.head = true;
  const keepInputs = s.stash === "inputs" || schedule.virtual === 1;

  const spreads = spreadsOf(report, choice, layout);
  const local = sum(spreads.map((x) => x.weights));
  const sharded = sum(spreads.map((x) => x.weights / x.replicas));

  const activation = tokens * m.d_model * item;
  const slots = (what) => Math.max(1, ...peaks(schedule, what, keepInputs));
  let stash = (slots("activations") + slots("cotangents")) * activation;
  const quantised = Math.abs(then.expertBytes - param) > 0.01;
  const exchange = exchangeOf(report, choice, tokens, quantised ? MX_BYTES : item);
  const most = choice.ep * tokens * Math.min(m.top_k, m.num_experts / choice.ep);
  // buffers of overflow=exact are whole multiples of 8 rows (moe/layout.py)
  const unit = s.capacity_rows % 8 ? 1 : 8, wanted = Math.min(Math.ceil(s.capacity_factor * tokens * m.top_k), most);
  const rows = choice.ep === 1 ? tokens * m.top_k : Math.ceil(wanted / unit) * unit;
  const moeHere = m.n_layers > m.n_dense_layers;
  const dispatch = moeHere ? 2 * (rows + tokens * m.top_k) * m.d_model * item : 0;

  // scaled from the plan
  const base = report.memory.categories;
  const layersNow = layout.fullest.dense + layout.fullest.moe;
  const saved = base.saved * (tokens / s.tokens) * (layersNow / then.layers);
  const temporaries = base.temporaries * (tokens / s.tokens);
  if (!keepInputs) stash += Math.max(0, base.stash - then.rings) * (slots("stash") / then.stash) *
    (tokens / s.tokens) * (layersNow / then.layers);

  const categories = {
    weights: local * param + spreads[0].weights * (then.expertBytes - param), master: sharded * FP32, moments: 2 * sharded * FP32, gradients: local * FP32,
    stash, saved: keepInputs ? saved : 0, dispatch, temporaries,
  };
  const collectives = collectivesOf(report, choice, { schedule, spreads, tokens, exchange, param, activation, keepInputs });
  const made = {
    problem: null, schedule, layout, tokens, rows, exchange, devices, categories, collectives,
    total: sum(Object.values(categories)), bubble: bubbleOf(schedule), source: "formulas",
  };
  if (own && isOwn(report, choice)) {
    made.categories = base;
    made.total = report.memory.peak_bytes;
    made.collectives = report.collectives.map((c) => ({ ...c, axes: c.axis.split("+") }));
    made.source = report.source === "compiled" ? "the compiled step" : "formulas";
  }
  return made;
}

// Weights on a device by how they are spread, and over how many devices they are repeated.
function spreadsOf(report, choice, layout) {
  const m = report.model, block = perBlock(m), shards = choice.dp * choice.ep;
  const ends = report.settings.ends === "sharded" && choice.pp > 1, table = m.parameters.embedding + m.parameters.head;
  return [
    { of: "experts", weights: (block.experts / choice.ep) * layout.slots.moe, replicas: choice.dp, axes: ["dp"] },
    { of: "the rest of blocks", weights: block.moe * layout.slots.moe + block.dense * layout.slots.dense,
      replicas: shards, axes: ["dp", "ep"] },
    { of: "embedding and head", weights: ends ? table / choice.pp + block.ends - table : block.ends,
      replicas: ends ? shards : shards * choice.pp, axes: ends ? ["dp", "ep"] : ["pp", "dp", "ep"] },
  ];
}

// What the scaled categories were made of on the plan's own mesh. expertBytes: of one weight of an expert; with MXFP8 copies
// it is not that of the dtype, so it is read off the plan's total.
function baselineOf(report) {
  const s = report.settings;
  const schedule = makeSchedule(s.schedule, s.pp, s.microbatches, s.chunks);
  const keepInputs = s.stash === "inputs" || schedule.virtual === 1;
  const layout = stagesOf(report.model, schedule);
  const slots = (what) => Math.max(1, ...peaks(schedule, what, keepInputs));
  const activation = s.tokens * report.model.d_model * BYTES[s.compute_dtype];
  const [experts, ...rest] = spreadsOf(report, s, layout).map((x) => x.weights), param = BYTES[s.params_dtype];
  const expertBytes = s.mxfp8 && experts ? (report.memory.categories.weights - sum(rest) * param) / experts : param;
  return {
    expertBytes,
    layers: layout.fullest.dense + layout.fullest.moe,
    rings: (slots("activations") + slots("cotangents")) * activation,
    stash: slots("stash"),
  };
}

function linkOf(report, choice, axes) {
  const span = axes.includes("pp") ? choice.pp * choice.dp * choice.ep
    : axes.includes("dp") ? choice.dp * choice.ep : choice.ep;
  return span <= report.machine.gpus_per_node ? "nvlink" : "network";
}

function collectivesOf(report, choice, made) {
  const found = [];
  if (choice.ep > 1 && report.model.n_layers > report.model.n_dense_layers) {
    const runs = exchangeRuns(report, made.schedule, made.keepInputs);
    ["forward", "backward"].forEach((when, i) => {
      for (const hop of made.exchange.hops)
        found.push({ kind: hop.kind, axes: ["ep"], purpose: `dispatch and combine, ${when}`, count: 2 * runs[i],
          bytes: hop.bytes * runs[i], link: hop.link });
    });
  }
  if (choice.pp > 1) {
    const count = 2 * made.schedule.ticks;
    found.push({ kind: "collective-permute", axes: ["pp"], purpose: "between stages", count,
      bytes: made.activation * count, link: linkOf(report, choice, ["pp"]) });
  }
  for (const [kind, size, what] of [["reduce-scatter", FP32, "gradients"], ["all-gather", made.param, "weights"]])
    for (const spread of made.spreads) {
      const axes = spread.axes.filter((axis) => choice[axis] > 1);
      if (spread.replicas > 1 && spread.weights)
        found.push({ kind, axes, purpose: `${what} of ${spread.of}`, count: 1,
          bytes: (spread.weights * size * (spread.replicas - 1)) / spread.replicas, link: linkOf(report, choice, axes) });
    }
  return found;
}
