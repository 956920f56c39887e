// Pipeline schedules as tables of cells [tick][stage] = {op, m, chunk} or null, made as moejax/parallel/schedule_makers.py
// makes them, and what waits on a stage meanwhile, as moejax/parallel/schedules.py counts it.
"use strict";

const SCHEDULES = ["gpipe", "1f1b", "1f1b_lockstep", "interleaved_1f1b", "zero_bubble", "zero_bubble_v"];

function blankTable(ticks, stages) {
  return Array.from({ length: ticks }, () => Array(stages).fill(null));
}

function chunksOf(name) {
  return name === "interleaved_1f1b" || name === "zero_bubble_v" ? 2 : 1;
}

function makeSchedule(name, stages, microbatches, chunks = chunksOf(name)) {
  if (stages === 1) [name, chunks] = ["1f1b", 1];
  const groups = groupsOf(stages, microbatches);
  let table;
  if (name === "1f1b") table = oneForwardOneBackward(stages, microbatches);
  else if (name === "gpipe") table = phased(stages, microbatches, chunks, [microbatches], true);
  else if (name === "zero_bubble")
    table = splitBackward(chunks === 1 ? oneForwardOneBackward(stages, microbatches)
      : phased(stages, microbatches, chunks, groups, false), microbatches * chunks);
  else if (name === "zero_bubble_v") {
    const tables = [true, false].map((first) => zeroBubbleV(stages, microbatches, first));
    const stash = (t) => Math.max(...peaks(asSchedule(name, stages, microbatches, 2, t), "inputs"));
    const [a, b] = tables;
    table = a.length < b.length || (a.length === b.length && stash(a) <= stash(b)) ? a : b;
  } else table = phased(stages, microbatches, chunks, groups, false);
  return asSchedule(name, stages, microbatches, chunks, table);
}

function asSchedule(name, stages, microbatches, chunks, table) {
  const v = name === "zero_bubble_v";
  const schedule = { name, stages, microbatches, chunks, table, ticks: table.length, virtual: stages * chunks };
  schedule.virtualStage = (stage, chunk) => chunk * stages + (v && chunk % 2 ? stages - 1 - stage : stage);
  schedule.stageOf = (q) => (v && Math.floor(q / stages) % 2 ? stages - 1 - (q % stages) : q % stages);
  return schedule;
}

function oneForwardOneBackward(stages, microbatches) {
  const table = blankTable(2 * (microbatches + stages - 1), stages);
  for (let s = 0; s < stages; s++)
    for (let m = 0; m < microbatches; m++) {
      table[s + 2 * m][s] = { op: "F", m, chunk: 0 };
      table[2 * stages - 1 - s + 2 * m][s] = { op: "B", m, chunk: 0 };
    }
  return table;
}

function groupsOf(stages, microbatches) {
  const count = Math.max(1, Math.floor(microbatches / stages));
  return Array.from({ length: count }, (_, i) => Math.floor(microbatches / count) + (i < microbatches % count ? 1 : 0));
}

function phased(stages, microbatches, chunks, groups, flush) {
  const order = [];
  let begin = 0, first = 0;
  for (const size of groups) {
    const stride = Math.max(size, stages);
    for (let i = 0; i < size; i++) order.push([first + i, begin + i, stride]);
    begin += chunks * stride;
    first += size;
  }
  let delay = Math.max(...order.map(([, , stride]) => (chunks - 1) * stride)) + stages - 1;
  if (flush) delay += microbatches - 1;
  const table = blankTable(2 * (begin + delay + stages), stages);
  for (const [m, place, stride] of order)
    for (let chunk = 0; chunk < chunks; chunk++) {
      const forward = place + chunk * stride, backward = place + (chunks - 1 - chunk) * stride + delay;
      for (let s = 0; s < stages; s++) {
        table[2 * (forward + s)][s] = { op: "F", m, chunk };
        table[2 * (backward + stages - 1 - s) + 1][s] = { op: "B", m, chunk };
      }
    }
  return table.filter((row) => row.some((cell) => cell));
}

function splitBackward(base, backwards) {
  const ticks = base.length, stages = base[0].length;
  const pending = blankTable(ticks, stages), filled = blankTable(ticks, stages);
  for (let s = 0; s < stages; s++) {
    let waiting = 0;
    for (let t = 0; t < ticks; t++) {
      const cell = base[t][s];
      filled[t][s] = !cell && waiting > 0;
      waiting = Math.max(0, waiting + (cell && cell.op === "B" ? 1 : 0) - (cell ? 0 : 1));
      pending[t][s] = waiting;
    }
  }
  const room = Array(ticks).fill(Infinity);
  for (let s = 0; s < stages; s++) {
    let least = Infinity;
    for (let t = ticks - 1; t >= 0; t--) {
      least = Math.min(least, filled[t][s] ? pending[t][s] : backwards);
      room[t] = Math.min(room[t], pending[t][s], least);
    }
  }
  const whole = [];
  for (let t = 0; t < ticks; t++) whole.push(Math.max(t ? whole[t - 1] : 0, Math.max(0, room[t])));
  const last = whole[ticks - 1];
  const total = ticks + last + Math.max(...pending[ticks - 1].map((p) => p - last));
  const table = blankTable(total, stages);
  const moved = base.map((_, t) => t + (t ? whole[t - 1] : 0));
  const taken = new Map(moved.map((to, t) => [to, t]));
  for (let t = 0; t < ticks; t++)
    table[moved[t]] = base[t].map((cell) => cell && { ...cell, op: cell.op === "B" ? "I" : cell.op });
  for (let s = 0; s < stages; s++) {
    const source = [], target = [];
    for (let t = 0; t < total; t++) {
      if (table[t][s] && table[t][s].op === "I") source.push(table[t][s]);
      if (!taken.has(t) || filled[taken.get(t)][s]) target.push(t);
    }
    source.forEach((cell, i) => (table[target[i]][s] = { ...cell, op: "W" }));
  }
  return table;
}

function zeroBubbleV(stages, microbatches, weightFirst) {
  const count = 2 * stages, own = (s) => [2 * stages - 1 - s, s];
  const home = (q) => (q < stages ? q : count - 1 - q);
  const done = { F: Array(count).fill(0), I: Array(count).fill(0), W: Array(count).fill(0) };
  const table = [];
  while (done.W.some((n) => n < microbatches)) {
    const chosen = [];
    for (let s = 0; s < stages; s++) {
      const mine = own(s);
      const begun = mine.reduce((sum, q) => sum + done.F[q] - done.W[q], 0);
      const inputs = mine.filter((q) => done.I[q] < (q === count - 1 ? done.F[q] : done.I[q + 1]));
      const forwards = mine.filter(
        (q) => done.F[q] < (q === 0 ? microbatches : done.F[q - 1]) && begun < count - (q < stages ? 1 : 0));
      const weights = mine.filter((q) => done.W[q] < done.I[q]);
      const wishes = [["I", inputs], ["F", forwards], ["W", weights]];
      if (weightFirst) wishes.splice(1, 2, ["W", weights], ["F", forwards]);
      const wish = wishes.find(([, ready]) => ready.length);
      if (wish) chosen.push([wish[0], wish[1][0]]);
    }
    const row = Array(stages).fill(null);
    for (const [op, q] of chosen) {
      row[home(q)] = { op, m: done[op][q], chunk: Math.floor(q / stages) };
      done[op][q] += 1;
    }
    table.push(row);
  }
  return table;
}

// When each op runs: [microbatch][virtual stage] -> tick.
function opTicks(schedule) {
  const make = () => blankTable(schedule.microbatches, schedule.virtual);
  const when = { forward: make(), backward: make(), weight: make() };
  schedule.table.forEach((row, t) => row.forEach((cell, s) => {
    if (!cell) return;
    const q = schedule.virtualStage(s, cell.chunk);
    if (cell.op === "F") when.forward[cell.m][q] = t;
    if (cell.op === "B" || cell.op === "I") when.backward[cell.m][q] = t;
    if (cell.op === "B" || cell.op === "W") when.weight[cell.m][q] = t;
  }));
  return when;
}

// Most values of a kind alive on each stage: "activations" (stage inputs), "cotangents", "stash" (what forwards keep), and
// "inputs": as schedules.peak_stash, activations and, on the first virtual stage, what its forwards began.
function peaks(schedule, what, keepInputs = true) {
  const when = opTicks(schedule), last = schedule.virtual - 1;
  const change = Array.from({ length: schedule.stages }, () => Array(schedule.ticks + 2).fill(0));
  const lives = (q, start, end) => {
    change[schedule.stageOf(q)][start] += 1;
    change[schedule.stageOf(q)][end + 1] -= 1;
  };
  for (let m = 0; m < schedule.microbatches; m++)
    for (let q = 0; q <= last; q++) {
      if ((what === "activations" || what === "inputs") && q > 0) {
        const end = keepInputs ? when.weight[m][q] : q === last ? when.backward[m][q] : when.forward[m][q];
        lives(q, when.forward[m][q - 1] + 1, end);
      }
      if (what === "cotangents" && q < last) lives(q, when.backward[m][q + 1] + 1, when.weight[m][q]);
      if (what === "stash" || (what === "inputs" && q === 0)) lives(q, when.forward[m][q], when.weight[m][q]);
    }
  return change.map((row) => {
    let now = 0, most = 0;
    for (const step of row) most = Math.max(most, (now += step));
    return most;
  });
}

// Idle share when all stages begin a tick together and a tick lasts as long as its dearest op.
function bubbleOf(schedule, costs = { F: 1, B: 2, I: 1, W: 1 }) {
  let total = 0, busy = 0;
  for (const row of schedule.table) {
    const lasting = row.map((cell) => (cell ? costs[cell.op] : 0));
    total += Math.max(...lasting);
    busy += lasting.reduce((a, b) => a + b, 0);
  }
  return 1 - busy / (schedule.stages * total);
}
