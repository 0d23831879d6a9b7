"use strict";
// The front page's answers, from committed predictions: tools/front_page.py makes them, says how the page interpolates,
// and holds this against predictions of other choices. Sizes are in MiB, until they are shown.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLUMN = Object.fromEntries(DATA.columns.map((name, index) => [name, index]));
const SHOWN = [ // of a bar: what, its colour, the colour of words on it
  ["weights", "#0072B2", "#fff"],
  ["optimizer_states", "#009E73", "#000"],
  ["gradients", "#56B4E9", "#000"],
  ["activations", "#E69F00", "#000"],
  ["logits_and_loss", "#D55E00", "#000"],
  ["temporaries", "#CC79A7", "#000"],
  ["workspaces and rounding", "#999999", "#000"],
  ["kept by the allocator", "#b5bcc4", "#000"],
  ["CUDA's context", "#d3d8dd", "#000"],
];
const LOSS = { same: "same loss", nearly: "nearly the same loss", another: "another training" };
const $ = id => document.getElementById(id);
const choice = { model: "gpt2", batch: 8, length: 1024, gpu: "t4", mode: "full", switches: [] };
let before = null; // "Make it fit" was pressed: what Undo brings back

// ---- words ----

const spaced = name => name.replaceAll("_", " ");
const count = number => number.toLocaleString("en");

function size(mib) {
  if (Math.abs(mib) < 100) return `${Math.round(mib)} MiB`;
  const gib = mib / 1024;
  return `${Math.abs(gib) >= 100 ? Math.round(gib) : gib.toFixed(1)} GiB`;
}

function inWords(made) { // a set of techniques
  const titles = made.switches.map(name => titleOf(name, made));
  if (made.mode !== "full") titles.push(modeTitle(made.mode));
  return titles.join(", ");
}

const modelOf = made => DATA.models.find(model => model.name === made.model);
const cardOf = made => DATA.cards.find(card => card.name === made.gpu);
const shortName = card => card.title.replace(/^(NVIDIA|GeForce) /, "");
const modeTitle = name => name === "mixed" ? `${DATA.modes.mixed.title} (${cardOf(choice).bf16 ? "bf16" : "fp16"})` : DATA.modes[name].title;
const titleOf = (name, made) => name === "acc" && made.batch > 1 ? `${DATA.switches.acc.title}, ${made.batch} × 1` : DATA.switches[name].title;

// ---- the answer: as `answer` in tools/front_page.py ----

function pointsOf(made) { // the rows of its set, and how many tokens go through the model at a time
  const accumulates = made.switches.includes("acc") && made.batch > 1;
  const kept = made.switches.filter(name => name !== "acc" || (accumulates && !DATA.adapters.includes(made.mode)));
  const rows = modelOf(made).points[[made.mode, ...kept].join("+")];
  return { rows, tokens: made.length * (accumulates ? 1 : made.batch), accumulates };
}

function isPredicted(made, accumulates) { // in this very shape
  const model = modelOf(made);
  if (accumulates && DATA.adapters.includes(made.mode)) return false;
  const shapes = accumulates ? model.accumulated : model.shapes;
  return shapes.some(([batch, length]) => batch === made.batch && length === made.length);
}

function verdictOf(row, card, margin) {
  const room = card.memory - card.extra;
  if (row[COLUMN.reserved] + margin <= room) return "fits";
  return row[COLUMN.allocated] - margin > room ? "over" : "close";
}

function suits(made) { // the points say something of it: as `suits` there
  const card = cardOf(made), model = modelOf(made);
  if (!model.modes.includes(made.mode) || (made.mode === "bf16" && !card.bf16)) return false;
  if (!model.grouped || (made.mode !== "full" && card.fused)) return true;
  return made.mode === "full" && made.length === DATA.length;
}

function lengthsFor(made) { // of a grouped model, on a card without kernels for it, the one length of the points
  const model = modelOf(made);
  return model.grouped && !cardOf(made).fused ? [DATA.length] : model.lengths;
}

function answerTo(made) { // null where it cannot be
  const card = cardOf(made), { rows, tokens, accumulates } = pointsOf(made);
  if (!rows || !suits(made)) return null;
  const after = rows.findIndex(row => row[COLUMN.tokens] >= tokens);
  const ends = rows[after][COLUMN.tokens] === tokens ? [rows[after]] : [rows[after - 1], rows[after]];
  const [low, high] = [ends[0], ends.at(-1)];
  const part = ends.length > 1 ? (tokens - low[COLUMN.tokens]) / (high[COLUMN.tokens] - low[COLUMN.tokens]) : 0;
  const exact = card.kind === DATA.kind && isPredicted(made, accumulates);
  const verdicts = new Set(ends.map(row => verdictOf(row, card, exact ? 0 : DATA.margin)));
  const at = name => low[COLUMN[name]] + part * (high[COLUMN[name]] - low[COLUMN[name]]);
  const need = at("reserved") + card.extra, tensors = at("allocated") + card.extra;
  const parts = Object.fromEntries(SHOWN.slice(0, 6).map(([name]) => [name, at(name)]));
  const named = Object.values(parts).reduce((sum, one) => sum + one, 0);
  parts["workspaces and rounding"] = at("allocated") - named + card.extra - card.context;
  parts["kept by the allocator"] = at("reserved") - at("allocated");
  parts["CUDA's context"] = card.context;
  return { card, need, tensors, parts, between: ends.length > 1, verdict: verdicts.size > 1 ? "close" : [...verdicts][0] };
}

function toggled(made, name) {
  const switches = made.switches.includes(name) ? made.switches.filter(other => other !== name) : [...made.switches, name];
  return { ...made, switches: inOrder(switches) };
}
const inOrder = switches => Object.keys(DATA.switches).filter(name => switches.includes(name));

// ---- the set that makes it fit: same loss before nearly, nearly before another training; then the fewest changes ----

function waysToFit(made) {
  const model = modelOf(made), losses = Object.keys(LOSS), ways = [];
  const names = ["acc", ...model.switches].filter(name => !made.switches.includes(name) && (name !== "acc" || made.batch > 1));
  for (const mode of model.modes) {
    for (let bits = 0; bits < 2 ** names.length; bits += 1) {
      const added = names.filter((_, index) => bits & (1 << index));
      const way = { ...made, mode, switches: inOrder([...made.switches, ...added]) };
      const changes = added.length + (mode !== made.mode);
      const loss = mode === made.mode ? 0 : losses.indexOf(DATA.modes[mode].loss); // what is chosen costs nothing more
      const price = added.reduce((sum, name) => sum + DATA.switches[name].price, 0);
      if (changes && answerTo(way)?.verdict === "fits") ways.push({ ...way, added, order: [loss, changes, price] });
    }
  }
  return ways.sort((a, b) => a.order.map((one, index) => one - b.order[index]).find(Boolean) ?? 0);
}

// ---- what is shown ----

function node(kind, classes, text) {
  const made = document.createElement(kind);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showVerdict(now) {
  const { card, need, tensors, verdict } = now, name = shortName(card);
  const about = now.between ? "about " : "", left = card.memory - need;
  const room = `${about}${size(Math.abs(left))} ${left < 0 ? "too much" : "to spare"}`;
  const words = { fits: `✓ Fits, ${room}`, over: `✗ ${room[0].toUpperCase()}${room.slice(1)}`, close: `≈ Close: ${room}` };
  $("verdict").className = verdict;
  if ($("words").textContent !== words[verdict]) $("words").textContent = words[verdict];
  let because = `needs ${about}${size(need)}; the ${name} has ${size(card.memory)}`;
  if (verdict === "close" && now.between) because += "; it lies between two predicted points, with another answer at each";
  else if (verdict === "close") because += `; ${size(tensors)} without what PyTorch's allocator keeps and would have to give back`;
  $("because").textContent = `${because} · predicted, nothing was run`;
}

function showBar(now) {
  const { card, need, parts } = now, whole = Math.max(need, card.memory), bar = $("bar"), share = mib => 100 * mib / whole;
  const shown = SHOWN.filter(([name]) => parts[name] >= 1);
  let end = 0;
  const segments = shown.map(([name, colour, ink]) => {
    end += parts[name];
    const label = `${spaced(name)} ${(parts[name] / 1024).toFixed(1)}`, wide = share(parts[name]) / 100 * bar.clientWidth;
    const segment = node("span", "", wide > 7.6 * label.length + 12 && end <= card.memory ? label : "");
    Object.assign(segment.style, { width: `${share(parts[name])}%`, background: colour, color: ink });
    return segment;
  });
  const left = card.memory - need, frame = node("div", "frame"), mark = node("i", "", `the card's ${size(card.memory)}`);
  if (left > 0) {
    const free = node("span", "free", share(left) > 9 ? `free ${(left / 1024).toFixed(1)}` : "");
    free.style.width = `${share(left)}%`;
    segments.push(free);
  } else {
    const over = node("div", "over-it");
    over.style.left = `${share(card.memory)}%`;
    segments.push(over);
  }
  frame.style.width = `${share(card.memory)}%`;
  frame.classList.toggle("narrow", share(card.memory) < 40);
  frame.append(mark);
  bar.replaceChildren(...segments, frame);
  const legend = shown.map(([name, colour]) => {
    const item = node("li"), swatch = node("i");
    swatch.style.background = colour;
    item.append(swatch, `${spaced(name)} ${size(parts[name])}`);
    return item;
  });
  $("legend").replaceChildren(...legend);
  const named = shown.map(([name]) => `${spaced(name)} ${size(parts[name])}`).join(", ");
  bar.setAttribute("aria-label", `${size(need)} of the card's ${size(card.memory)}: ${named}`);
}

function rowOf(kind, name) {
  const row = node("label", "row"), title = node("span", "name"), input = node("input"), words = node("span");
  words.id = `${name}-title`;
  input.type = kind;
  input.name = kind === "radio" ? "mode" : name;
  input.value = name;
  input.addEventListener("change", () => choose(kind === "radio" ? { mode: name } : toggled(choice, name)));
  const saves = node("span", "saves"), bar = node("i"), amount = node("span"), enough = node("b");
  title.append(input, words);
  saves.append(bar, amount, enough);
  const costs = node("small");
  saves.id = `${name}-saves`;
  costs.id = `${name}-costs`;
  input.setAttribute("aria-labelledby", words.id);
  input.setAttribute("aria-describedby", `${saves.id} ${costs.id}`);
  row.append(title, saves, costs);
  return { kind, name, row, input, words, saves, bar, amount, enough, costs };
}
const rows = [
  ...Object.keys(DATA.switches).map(name => rowOf("checkbox", name)),
  ...Object.keys(DATA.modes).map(name => rowOf("radio", name)),
];

function whyNot(row) {
  if (row.kind === "radio" && !modelOf(choice).modes.includes(row.name)) return "not predicted here for models of this size";
  if (row.name === "bf16" && !cardOf(choice).bf16) return "needs bf16 arithmetic: a card newer than the T4";
  if (row.kind === "radio" && !suits({ ...choice, mode: row.name })) {
    return row.name === "full" ? `predicted for ${count(DATA.length)} tokens alone: no fused attention in 32 bits here` : "not predicted for this card: no fused attention";
  }
  if (row.name === "acc" && choice.batch === 1) return "one sequence a step is all there is";
  if (row.name === "gelu" && !modelOf(choice).switches.includes("gelu")) return "this model's activation function is one operation already";
  return "";
}

function savedBy(row) { // MiB, everything else as it is chosen; a mode with the first one, or what is chosen
  const others = choice.switches.filter(name => name !== row.name);
  const [without, having] = row.kind === "radio"
    ? [suits({ ...choice, mode: "full" }) ? { ...choice, mode: "full" } : choice, { ...choice, mode: row.name }]
    : [{ ...choice, switches: others }, { ...choice, switches: inOrder([...others, row.name]) }];
  const answer = answerTo(having);
  return { saved: answerTo(without).need - answer.need, fits: answer.verdict === "fits" };
}

function showRows(now) {
  const results = rows.map(row => whyNot(row) ? null : savedBy(row));
  const most = Math.max(1, ...results.map(result => result?.saved ?? 0));
  rows.forEach((row, index) => {
    const result = results[index], why = whyNot(row), isFirst = row.name === "full" || (row.kind === "radio" && row.name === choice.mode && !suits({ ...choice, mode: "full" }));
    row.input.disabled = Boolean(why);
    row.input.checked = row.kind === "radio" ? choice.mode === row.name : choice.switches.includes(row.name) && !why;
    row.row.classList.toggle("is-on", row.input.checked);
    row.row.classList.toggle("cannot", Boolean(why));
    row.words.textContent = row.kind === "radio" ? modeTitle(row.name) : titleOf(row.name, choice);
    row.bar.hidden = !result || result.saved < 1;
    row.bar.style.setProperty("--share", Math.max(result?.saved ?? 0, 0) / most);
    row.amount.textContent = why || isFirst ? why : `${result.saved >= 0 ? "−" : "+"}${size(Math.abs(result.saved))}`;
    const isEnough = Boolean(result?.fits) && now.verdict !== "fits";
    row.enough.textContent = isEnough ? "✓ enough" : "";
    row.saves.classList.toggle("enough", isEnough);
    const loss = row.kind === "radio" ? `${LOSS[DATA.modes[row.name].loss]}: ` : "";
    row.costs.textContent = why ? "" : loss + (row.kind === "radio" ? DATA.modes : DATA.switches)[row.name].costs;
  });
}

function showWay(now) {
  const way = now.verdict === "fits" ? null : waysToFit(choice)[0];
  $("fit").hidden = !way;
  $("undo").hidden = !before;
  if (way) {
    const added = { ...way, switches: way.added, mode: way.mode === choice.mode ? "full" : way.mode };
    const less = now.need - answerTo(way).need;
    $("how").textContent = `${inWords(added)}: ${size(less)} less, ${LOSS[way.mode === choice.mode ? "same" : DATA.modes[way.mode].loss]}`;
    $("fit").onclick = () => {
      const back = { ...choice };
      choose({ mode: way.mode, switches: way.switches });
      before = back;
      show();
      $("undo").focus();
    };
  } else if (now.verdict !== "fits") {
    $("because").textContent += " · nothing on this page makes it fit: take a smaller batch, shorter sequences or a larger card";
  }
}

function command() { // the same question to the workbench itself
  const techniques = [...DATA.modes[choice.mode].command, ...choice.switches.flatMap(name => DATA.switches[name].command)];
  const options = techniques.map(name => ` --technique ${name.replace("{batch}", choice.batch)}`).join("");
  const dtype = text => cardOf(choice).bf16 ? text : text.replace("mixed_precision", "mixed_precision=dtype:fp16");
  return `workbench predict ${choice.model} --gpu ${choice.gpu} --batch-size ${choice.batch} --sequence-length ${choice.length}${dtype(options)}`;
}

function show() {
  const now = answerTo(choice);
  showVerdict(now);
  showBar(now);
  showRows(now);
  showWay(now);
  const code = node("code", "", command());
  $("foot").replaceChildren("Ask the workbench itself, of this or any other model: ", code);
}

// ---- choosing ----

function choose(changed) {
  before = null;
  Object.assign(choice, changed);
  settle();
  history.replaceState(null, "", `#${[choice.model, choice.batch, choice.length, choice.gpu, choice.mode, ...choice.switches].join(",")}`);
  show();
}

function settle() { // what this model and this card cannot have is left out
  const model = modelOf(choice), lengths = lengthsFor(choice);
  if (!lengths.includes(choice.length)) choice.length = Math.max(lengths[0], ...lengths.filter(length => length <= choice.length));
  choice.switches = inOrder(choice.switches.filter(name => (name === "acc" && choice.batch > 1) || model.switches.includes(name)));
  if (!suits(choice)) choice.mode = model.modes.find(mode => suits({ ...choice, mode }));
  fill($("length"), lengths.map(length => [length, count(length)]), choice.length);
  for (const name of ["model", "batch", "gpu"]) $(name).value = choice[name];
}

function fill(field, options, chosen) {
  field.replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

function fromAddress() { // what a link chose, as far as there is such
  const [model, batch, length, gpu, mode, ...switches] = location.hash.slice(1).split(",");
  const known = {
    model: DATA.models.some(one => one.name === model), batch: DATA.batches.includes(Number(batch)),
    gpu: DATA.cards.some(card => card.name === gpu), mode: mode in DATA.modes,
  };
  if (!Object.values(known).every(Boolean) || !(Number(length) >= Math.min(...DATA.models[0].lengths))) return;
  Object.assign(choice, { model, batch: Number(batch), length: Number(length), gpu, mode, switches: inOrder(switches) });
}

function begin() {
  fill($("model"), DATA.models.map(model => [model.name, model.title]), choice.model);
  fill($("batch"), DATA.batches.map(batch => [batch, String(batch)]), choice.batch);
  fill($("gpu"), DATA.cards.map(card => [card.name, `${shortName(card)}${card.title.includes("GB") ? "" : `, ${card.sold}`}`]), choice.gpu);
  for (const name of ["model", "gpu"]) $(name).addEventListener("change", event => choose({ [name]: event.target.value }));
  for (const name of ["batch", "length"]) $(name).addEventListener("change", event => choose({ [name]: Number(event.target.value) }));
  $("undo").addEventListener("click", () => { choose(before); $("fit").focus(); });
  for (const row of rows) $(row.kind === "radio" ? "modes" : "switches").append(row.row);
  fromAddress();
  settle();
  show();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; show(); } });
}

begin();
