// The script of a report's page. It reads the JSON of report.py's `to_json`, fills the table of findings, and draws
// each plot with Vega-Lite for the room that there is, beside a sentence of what it shows. Limits come from the JSON.

const data = JSON.parse(document.getElementById("data").textContent);
const against = data.against, filter = document.getElementById("filter");

// --- words and elements

const make = (tag, parent, fields = {}) => parent.appendChild(Object.assign(document.createElement(tag), fields));
const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const called = (number, digits = 3) =>
  number === null || number === undefined ? "inf or NaN" : String(Number(number.toPrecision(digits)));

function fillHeader() {
  document.getElementById("verdict").textContent = `${data.verdict}.`;
  const recorded = `${many(data.records, "step")} recorded, the last one ${data.last ?? "–"}`;
  const compared = against ? `. Against ${against.name}: ${against.compared}` : "";
  const counts = `${many(data.layers.length, "layer")}, ${recorded}; ${many(data.findings.length, "finding")}`;
  document.getElementById("about").textContent = counts + compared;
}

function fillNavigation() {
  const nav = document.querySelector("nav");
  for (const title of document.querySelectorAll("h2")) {
    const textContent = title.textContent.split(/, (?!%|dB)/)[0];
    make("a", nav, { href: `#${title.id || title.parentElement.id}`, textContent });
  }
}

// --- the table of findings; on a narrow screen each row is a card

const ranks = { critical: 200, warning: 100, note: 0 }; // a level counts before a number
const columns = [
  ["severity", f => ranks[f.level] + f.severity], ...(against ? [["state", f => f.state]] : []),
  ["finding", f => f.kind], ["layer", f => f.layer], ["role", f => f.role], ["products", f => f.products.join(", ")],
  ["from step", f => f.begins], ["worst at", f => f.worst], ["cause", f => f.cause], ["remedy", f => f.remedy]];
const body = document.querySelector("#findings tbody");
const box = document.querySelector(".scrolled"), more = document.getElementById("more");
const visibleRows = () => [...body.children].filter(row => !row.hidden);

function listFindings(parent, findings) {
  for (const f of findings) {
    const item = make("li", parent);
    make("span", item, { className: `level ${f.level}`, textContent: f.level });
    item.append(` ${f.sentence}`);
  }
}

const fillCell = { // the other columns' cells have their values as text
  remedy(cell, f, value) {
    make("code", cell, { textContent: value });
    make("div", cell, { textContent: f.expected });
    const ariaLabel = `Copy the remedy: ${f.kind} ${f.layer} ${f.role}`;
    const copy = make("button", cell, { className: "copy", textContent: "Copy", ariaLabel });
    copy.onclick = async () => {
      await navigator.clipboard.writeText(value);
      copy.textContent = copy.ariaLabel = "Copied";
    };
  },
  severity(cell, f) {
    make("span", cell, { className: `level ${f.level}`, textContent: f.level });
    cell.append(" ");
    make("span", cell, { textContent: `${f.severity.toFixed(1)} of 10` });
  },
  state(cell, f, value) {
    make("span", cell, { className: `level ${value}`, textContent: value });
  },
  layer(cell, f, value) {
    for (const part of value.match(/[^.]+[.]?/g) ?? []) {
      cell.append(part);
      make("wbr", cell);
    }
  },
  cause(cell, f, value) {
    cell.textContent = value;
    if (f.cast) make("div", cell, { textContent: f.cast });
    if (!f.consequences.length) return;
    const folded = make("details", cell);
    make("summary", folded, { textContent: many(f.consequences.length, "consequence") });
    listFindings(make("ul", folded), f.consequences);
  },
};

function fillRows() {
  data.findings.forEach((f, place) => {
    f.state = against?.states[place];
    const row = make("tr", body, { role: "row" });
    row.values = columns.map(([, value]) => value(f));
    row.layers = [f, ...f.consequences].map(each => each.layer.toLowerCase());
    columns.forEach(([name], i) => {
      const cell = make("td", row, { className: name, role: "cell" });
      cell.dataset.name = name;
      if (fillCell[name]) fillCell[name](cell, f, row.values[i]);
      else cell.textContent = row.values[i];
    });
  });
}

function fillHead() {
  const head = document.querySelector("#findings thead tr");
  const isSorted = [...body.children].every((row, i, all) => !i || row.values[0] <= all[i - 1].values[0]);
  const order = (a, b) => typeof a === "number" ? (a < b ? -1 : a > b ? 1 : 0) : a.localeCompare(b);
  columns.forEach(([name], i) => {
    const ariaSort = isSorted && !i ? "descending" : "none";
    const cell = make("th", head, { scope: "col", role: "columnheader", ariaSort });
    make("button", cell, { textContent: name, type: "button" }).onclick = () => {
      const sign = cell.ariaSort === "ascending" ? -1 : 1;
      [...head.children].forEach(other => { other.ariaSort = "none"; });
      cell.ariaSort = sign > 0 ? "ascending" : "descending";
      body.append(...[...body.children].sort((a, b) => sign * order(a.values[i], b.values[i])));
    };
  });
}

function countRowsBelow() {
  const rows = visibleRows(), end = box.getBoundingClientRect().bottom - 40;
  const below = rows.filter(row => row.getBoundingClientRect().bottom > end + 4).length;
  more.hidden = box.classList.contains("all") || box.scrollHeight <= box.clientHeight + 1 || !below;
  more.textContent = `▼ ${below} of ${many(rows.length, "finding")} below: show all`;
}

function showAllRows() {
  box.classList.add("all");
  countRowsBelow();
  box.focus();
}

function fillTable() {
  document.getElementById("none").hidden = data.findings.length > 0;
  document.getElementById("remedies").hidden = data.findings.length === 0;
  box.hidden = !data.findings.length;
  fillRows();
  fillHead();
  box.onscroll = countRowsBelow;
  more.onclick = showAllRows;
  new ResizeObserver(countRowsBelow).observe(body);
  if (against?.gone.length) {
    const gone = document.getElementById("gone");
    make("h2", gone, { textContent: `Gone: ${many(against.gone.length, "finding")} that only ${against.name} has` });
    listFindings(make("ul", gone), against.gone);
  }
}

// --- what all plots share

const colours = ["#0072B2", "#A86A00", "#00805C"], roles = ["input", "weight", "grad_output"];
const runs = ["this run", against?.name], runScale = { domain: runs, range: ["#000", "#0072B2"] };
const isShown = "layers == '' || indexof(lower(datum.layer), lower(layers)) >= 0";
const worse = { sqnr: Math.min, resolution: Math.min, cosine: Math.min }; // others: the largest
const valid = values => values.filter(value => value !== null);
const worstOf = (row, field) => valid(row[field]).length ? (worse[field] ?? Math.max)(...valid(row[field])) : null;
const tooltips = fields => fields.map(field => typeof field === "string" ? { field } : field);
const plots = document.getElementById("plots");
let views = [], layout;

function layoutNow() {
  const room = plots.clientWidth, narrow = room < 700, labels = narrow ? 130 : 190;
  const labelExpr = length => // says most of a name
    `length(datum.label) > ${length}`
    + ` ? '…' + replace(slice(datum.label, ${1 - length}), regexp('^[.]'), '') : datum.label`;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches; // plots are turned then: the least values stay dark
  return {
    room, narrow, labels, labelExpr, dark,
    rowHeight: Math.max(5, Math.min(18, Math.floor(560 / data.layers.length))), // whole pixels: nothing shines through
    cell: (columns, left = labels) => Math.floor((room - left - 14 * columns) / columns), // width of one beside others
    params: [{ name: "layers", value: filter.value }],
    layerAxis: {
      labelOverlap: "greedy", labelSeparation: 3, labelLimit: labels - 4, minExtent: labels - 6, maxExtent: labels - 6,
      ticks: false, domain: false, labelExpr: labelExpr(narrow ? 22 : 34) },
    legend: { orient: "top", gradientLength: Math.min(260, room - labels - 20), titleLimit: room - labels },
    share: { type: "symlog", constant: 0.1, scheme: "viridis", reverse: dark, domain: [0, 100], clamp: true },
    config: {
      font: "system-ui, sans-serif", view: { stroke: null },
      axis: { grid: false, labelFontSize: narrow ? 10 : 11, titleFontSize: 12 },
      header: { titleFontSize: 0, labelFontSize: 13, labelFontWeight: 600 },
      legend: { labelLimit: room - 60, columns: narrow ? 1 : undefined } },
  };
}
const shares = { values: [0, 0.1, 1, 10, 100], format: "~r" };

async function plot(id, title, text, caption, spec, renderer = "svg", control = null) {
  const section = make("section", plots, { id });
  make("h2", section, { textContent: title });
  make("p", section, { textContent: text });
  if (control) section.append(control);
  const figure = make("figure", section);
  const place = make("div", figure, { role: "img", ariaLabel: title });
  make("figcaption", figure, { textContent: caption });
  const whole = { config: layout.config, background: "white", description: title, ...spec };
  const { view } = await vegaEmbed(make("div", place), whole, { mode: "vega-lite", actions: false, renderer });
  views.push(view);
  return view;
}

// --- heat maps: layers by steps

function heatCaption(rows, field, unit, scale) {
  const withWorst = rows.map(row => ({ ...row, worst: worstOf(row, field) })).filter(row => row.worst !== null);
  const worst = withWorst.sort((a, b) => (worse[field] ? 1 : -1) * (a.worst - b.worst))[0];
  if (!worst) return null;
  if (worst.worst === 0) return "None in any recorded step.";
  const step = data.steps[worst[field].indexOf(worst.worst)];
  const value = called(scale.of ? Math.log2(worst.worst) : worst.worst);
  const limit = { flushed: 100 * data.limits.flushed, clipped: 100 * data.limits.clipped }[field];
  const beyond = rows.filter(row => worstOf(row, field) > limit).length;
  const ever = limit ? `; ${beyond} of ${rows.length} are ever beyond the limit of ${called(limit)} %` : "";
  return `Worst: ${value} ${unit} in ${worst.layer} ${worst.role}, step ${step}${ever}.`;
}

function heatCells(title, field, unit, scale, legend, facets, isFaceted) {
  const { cell, rowHeight, layerAxis } = layout;
  const width = Math.max(1, Math.floor(cell(facets) / data.steps.length));
  const apart = Math.max(1, Math.ceil(data.steps.length / (width * data.steps.length / 55)));
  const values = data.steps.filter((_, i) => i % apart === 0);
  const fields = ["layer", ...(isFaceted ? ["role"] : []), "step", { field, title, format: ".4~g" }];
  return {
    width: { step: width }, height: { step: rowHeight }, view: { fill: "#d4d4da" },
    mark: { type: "rect", tooltip: true },
    encoding: {
      x: {
        field: "step", type: "ordinal", title: "step", scale: { padding: 0 },
        axis: { values, labelAngle: 0, labelOverlap: "greedy", ticks: false } },
      y: { field: "layer", type: "nominal", sort: null, title: null, scale: { padding: 0 }, axis: layerAxis },
      color: {
        field: "shown", type: "quantitative", scale: { ...scale, of: undefined }, title: unit,
        legend: { ...legend, ...layout.legend } },
      tooltip: tooltips(fields),
    },
  };
}

// `scale.of`: the expression of what is shown, where that is not the field itself
function heat(id, title, text, rows, field, unit, scale, { legend = {}, isFaceted = true } = {}) {
  const caption = heatCaption(rows, field, unit, scale);
  if (caption === null) return;
  const facets = isFaceted && !layout.narrow ? 3 : 1;
  const cells = heatCells(title, field, unit, scale, legend, facets, isFaceted);
  const faceted = {
    facet: { field: "role", sort: [...roles, "master"] }, columns: facets, spec: cells, spacing: 12 };
  const values = rows.map(row => ({ layer: row.layer, role: row.role, step: data.steps, [field]: row[field] }));
  const transform = [
    { filter: isShown }, { flatten: ["step", field] }, { filter: `isValid(datum.${field})` },
    { calculate: scale.of ?? `datum.${field}`, as: "shown" }];
  const key = document.createElement("p"); // a legend of empty cells
  make("span", key, { className: "swatch" });
  key.append(" no value in that record: nothing was cast or updated, or no number was finite and not 0");
  const hasEmpty = rows.some(row => row[field].includes(null));
  const spec = { params: layout.params, data: { values }, transform, ...(isFaceted ? faceted : cells) };
  return plot(id, title, text, caption, spec, "canvas", hasEmpty ? key : null);
}

const decades = (field, scheme) => ({ of: `log(max(datum.${field}, 0.001)) / LN2`, clamp: true, ...scheme });

function plotTwin() {
  const [cosine, beyond, inTurn] = data.limits.twin;
  const text = "Cosine of each weight's gradient with that of the same batches in high precision; the lowest of each"
    + ` column. Below ${cosine} in ${beyond} of ${inTurn} records in turn, FP8 changes that gradient.`;
  const scale = { scheme: "viridis", reverse: !layout.dark, domain: [0.5, 1], clamp: true };
  return heat("twin", "Gradients, against those in high precision", text, data.twins, "cosine", "cosine", scale,
    { isFaceted: false });
}

const plotFlushed = () => heat("flushed", "Flushed to zero",
  "Of the numbers that are not 0, those whose codes are 0; the worst cast of each role, of experts the worst one, the"
  + " worst record of each column.",
  data.casts, "flushed", "% of the numbers", layout.share, { legend: shares });

const plotClipped = () => heat("clipped", "Clipped",
  "Of the finite numbers, those beyond the largest that the scale has room for.",
  data.casts, "clipped", "% of the numbers", layout.share, { legend: shares });

const plotSqnr = () => heat("sqnr", "SQNR",
  `Signal over rounding noise, in decibels: E4M3 keeps about ${data.limits.sqnr.E4M3},`
  + ` E5M2 about ${data.limits.sqnr.E5M2}.`,
  data.casts, "sqnr", "dB", { scheme: "viridis", reverse: layout.dark, domain: [10, 35], clamp: true });

function plotStaleness() {
  const delayed = data.casts.filter(row => row.is_delayed);
  const scale = decades("assumed", { scheme: "purpleorange", domainMid: 0, domain: [-4, 4], reverse: true });
  if (delayed.length) return heat("assumed", "Staleness of delayed scales",
    "log2 of the amax over the largest number that the scale has room for: above 0 numbers are clipped, below 0 room is"
    + " unused.",
    delayed, "assumed", "octaves", scale);
}

function plotResolution() {
  const scale = decades("resolution", { scheme: "viridis", reverse: layout.dark, domain: [-8, 8] });
  return heat("resolution", "Updates against the weights' resolution",
    "log2 of a step's root mean square update over the distance between the weight's numbers: far below 0 updates are"
    + " rounded away, unless a master (beside, where the optimizer keeps one) holds them until they add up.",
    data.weights, "resolution", "octaves", scale, { isFaceted: data.weights.some(row => row.role === "master") });
}

// --- the loss and other numbers by step

const pointsOf = name => [data.scalars[name] ?? [], against?.scalars[name] ?? []]
  .flatMap((points, i) => points.map(point => ({ ...point, run: runs[i] })));

// `notFinite`: the first step that was not finite, which a curve of the largest of each few steps may not show
function curveInWords(points, notFinite) {
  const values = valid(points.map(point => point.value)), last = points.at(-1);
  const highest = values.length ? Math.max(...values) : null;
  if (notFinite === undefined && points.every(point => point.value === last.value)) {
    return `${called(last.value)} in all steps`;
  }
  const ends = [points[0], last].filter(point => point.value !== null);
  const parts = ends.map(point => `${called(point.value)} at step ${point.step}`);
  if (values.length) {
    parts.push(`at most ${called(highest)} at step ${points.find(point => point.value === highest).step}`);
  }
  if (notFinite !== undefined) parts.push(`inf or NaN first at step ${notFinite}`);
  return parts.join(", ");
}

function curvesInWords(name) {
  const ofOther = against?.scalars[name]?.length
    ? ` (${runs[1]}: ${curveInWords(against.scalars[name], against.not_finite[name])})` : "";
  return `${name}: ${curveInWords(data.scalars[name], data.not_finite[name])}${ofOther}.`;
}

// the layers of a number's plot: its curve; of the loss also the twins' losses; and the events as vertical lines
function curveLayers(name, isFirst, twins) {
  const axis = { tickCount: Math.min(12, Math.floor(layout.room / 70)) };
  const x = { field: "step", type: "quantitative", title: "step", scale: { nice: false }, axis };
  const key = { title: null, legend: isFirst ? { orient: "top" } : null };
  const curve = {
    data: { values: pointsOf(name) }, mark: { type: "line", strokeWidth: 1.2 },
    encoding: {
      x,
      y: {
        field: "value", type: "quantitative", title: name, scale: { zero: false },
        axis: { minExtent: 36, maxExtent: 36 } },
      color: against ? { field: "run", ...key, scale: runScale } : { value: "#000" } } };
  const ofTwin = {
    data: { values: twins }, mark: { type: "point", size: 26, strokeWidth: 1.2, tooltip: true },
    encoding: {
      x, y: { field: "value", type: "quantitative" },
      color: against ? { field: "run", scale: runScale, legend: null } : { value: "#0072B2" },
      tooltip: ["step", "value"].map(field => ({ field, format: ".4~g" })) } };
  const events = {
    data: { values: data.events }, mark: { type: "rule", strokeWidth: 1.5, tooltip: true },
    encoding: {
      x, color: { field: "kind", ...key, scale: { range: ["#D55E00", "#A8437F", "#00805C", "#7A5C00"] } },
      strokeDash: { field: "kind", legend: null }, tooltip: tooltips(["step", "kind", "text"]) } };
  return [curve, ...(name === "loss" && twins.length ? [ofTwin] : []), ...(data.events.length ? [events] : [])];
}

function plotLoss() {
  const names = ["loss", "grad_norm", "lr", "learning_rate"].filter(name => data.scalars[name]?.length);
  if (!names.length) return;
  const drawn = names.filter(name => new Set(pointsOf(name).map(point => point.value)).size > 1);
  const twins = pointsOf("twin_loss"), apart = data.twin_apart;
  const circles = twins.length ? "Circles: the same batches in high precision, in recorded steps. " : "";
  const distance = apart ? ` In high precision the loss of a recorded step is at most ${called(100 * apart.share)} %`
    + ` away, at step ${apart.step}.` : "";
  const resolve = { scale: { color: "independent" } };
  const vconcat = drawn.map(name => ({
    width: layout.room - 84, height: name === "loss" ? 200 : 70, resolve,
    layer: curveLayers(name, name === drawn[0], twins) }));
  return plot("loss", against ? "Loss of both runs" : "Loss, with switches, recoveries and skipped steps",
    `In a long run the largest value of each few steps. ${circles}Vertical lines: what happened in that step.`,
    names.map(curvesInWords).join(" ") + distance, { resolve, vconcat });
}

// --- both runs by layer

async function plotAgainst() {
  if (!against) return;
  await plotMeasureOfBoth("flushed", "flushed to zero, %", layout.share, shares);
  await plotMeasureOfBoth("clipped", "clipped, %", layout.share, shares);
  await plotMeasureOfBoth("sqnr", "SQNR, dB", { zero: false }, { tickCount: 5 });
}

function bothInWords(values, field) {
  const key = row => `${row.layer} ${row.role}`, sign = worse[field] ? -1 : 1;
  const before = new Map(values.filter(row => row.run === runs[1]).map(row => [key(row), row.value]));
  const both = values.filter(row => row.run === runs[0] && before.has(key(row)))
    .map(row => ({ ...row, was: before.get(key(row)) }));
  const most = both.toSorted((a, b) => Math.abs(b.value - b.was) - Math.abs(a.value - a.was))[0];
  const up = both.filter(row => sign * (row.value - row.was) > 0).length;
  if (!most) return "The runs have no layer in common.";
  const change = `${called(most.value)} here and ${called(most.was)} in ${runs[1]}`;
  return `Worse in this run: ${up} of ${both.length}. Largest change: ${key(most)}, ${change}.`;
}

function plotMeasureOfBoth(field, title, scale, axis) {
  const { params, narrow, labels, cell, rowHeight, layerAxis } = layout;
  const valueOf = row => ({ layer: row.layer, role: row.role, value: worstOf(row, field) });
  const values = [data.casts, against.casts]
    .flatMap((casts, i) => casts.map(row => ({ ...valueOf(row), run: runs[i] }))).filter(row => row.value !== null);
  const encoding = {
    x: {
      field: "value", type: "quantitative", title, scale: { ...scale, scheme: undefined, reverse: undefined },
      axis: { ...axis, grid: true } },
    y: { field: "layer", type: "nominal", sort: null, title: null, axis: { ...layerAxis, grid: true } },
    color: { field: "run", title: null, legend: { orient: "top" }, scale: runScale },
    shape: { field: "run", scale: { domain: runs, range: ["circle", "diamond"] } },
    tooltip: tooltips(["layer", "role", "run", "value"]) };
  const mark = { type: "point", filled: true, size: 50, opacity: 1, tooltip: true };
  const width = cell(narrow ? 1 : 3, labels + 20), height = { step: Math.max(8, rowHeight) };
  return plot(`against-${field}`, `Both runs by layer: ${title}`, "Each layer's worst recorded step.",
    bothInWords(values, field), {
      params, data: { values }, transform: [{ filter: isShown }], facet: { field: "role", sort: roles },
      columns: narrow ? 1 : 3, spacing: 12, spec: { width, height, mark, encoding } });
}

// --- tokens of experts

function plotLoads() {
  if (!data.loads.length) return;
  const loads = data.loads.map(row => ({ ...row, layer: row.name, expert: row.tokens.map((_, i) => i) }));
  const most = Math.max(...loads.map(row => row.tokens.length));
  const none = loads.reduce((sum, row) => sum + row.tokens.filter(count => !count).length, 0);
  const fullest = row => Math.max(...row.tokens) / row.mean;
  const worst = loads.toSorted((a, b) => fullest(b) - fullest(a))[0];
  const scale = { scheme: "purpleorange", domainMid: 0, domain: [-3, 3], clamp: true, reverse: true };
  const layers = [
    {
      mark: { type: "rect", tooltip: true },
      encoding: {
        color: { field: "octaves", type: "quantitative", title: "octaves", scale, legend: layout.legend },
        tooltip: tooltips(["layer", "expert", "tokens", { field: "mean", format: ".4~g" }]) } },
    { transform: [{ filter: "datum.tokens == 0" }], mark: { type: "text", text: "\u00d7", color: "#000" } }];
  return plot("loads", "Tokens of experts",
    "What each expert of a layer got in the last record, as octaves above or below the layer's mean; crossed out:"
    + " none.",
    `Balanced worst: ${worst.layer}, whose fullest expert got ${called(fullest(worst))} times the mean;`
    + ` ${many(none, "expert")} got none.`, {
      params: layout.params, data: { values: loads },
      transform: [
        { filter: isShown }, { flatten: ["tokens", "expert"] },
        { calculate: "log(max(datum.tokens, 0.5) / datum.mean) / LN2", as: "octaves" }],
      width: { step: Math.max(1, Math.min(26, Math.floor(layout.cell(1) / most))) },
      height: { step: Math.max(12, layout.rowHeight) },
      encoding: {
        x: {
          field: "expert", type: "ordinal", title: "expert",
          axis: { labelAngle: 0, labelOverlap: "greedy", ticks: false } },
        y: { field: "layer", type: "nominal", sort: null, title: null, axis: layout.layerAxis } },
      layer: layers });
}

// --- the histogram of one cast

function exponentsInWords(name) {
  const row = data.exponents.find(r => r.name === name), top = row.share.indexOf(Math.max(...row.share)) + data.lowest;
  const used = row.share.map((value, i) => value >= 1 ? i + data.lowest : null).filter(i => i !== null);
  if (!used.length) return `${row.name}: nothing was counted.`;
  const ends = `2^${used[0]} and 2^${used.at(-1) + 1}`;
  return `${row.name}, step ${row.step}: most numbers lie near 2^${top}, and all but a few between ${ends}.`;
}

function castOfWorstFinding() {
  const worst = data.findings.find(f => f.products.length);
  const name = worst && `${worst.layer} ${worst.role}, ${worst.products.join(" and ")}`;
  const row = worst && data.exponents.find(r => r.layer === worst.layer && r.name.startsWith(name));
  return row || data.exponents[0];
}

function histogram(x, width) {
  const values = data.exponents.map(r => (
    { name: r.name, share: r.share, exponent: r.share.map((_, i) => i + data.lowest) }));
  return {
    width, height: 170, data: { values },
    transform: [
      { filter: "datum.name == row" }, { flatten: ["share", "exponent"] },
      { calculate: "datum.exponent + 1", as: "end" }],
    mark: { type: "bar", color: colours[0], tooltip: true },
    encoding: {
      x: { ...x, field: "exponent", bin: "binned", title: null }, x2: { field: "end" },
      y: { field: "share", type: "quantitative", title: "thousandths" } } };
}

function formatWindows(x, width) {
  const values = data.exponents.flatMap(r => r.windows.map(w => ({ name: r.name, ...w })));
  const bars = (from, to, color) => ({
    mark: { type: "bar", height: 12, color, clip: true, tooltip: true },
    encoding: {
      x: { ...x, field: from }, x2: { field: to }, y: { field: "format", type: "nominal", title: null } } });
  return {
    width, height: 46, data: { values }, transform: [{ filter: "datum.name == row" }],
    layer: [bars("low", "normal", "#f3cf80"), bars("normal", "high", "#b77d00")] };
}

async function plotExponents() {
  if (!data.exponents.some(row => row.share.some(value => value > 0))) return;
  const first = castOfWorstFinding(), width = layout.room - 140;
  const control = Object.assign(document.createElement("label"), { className: "controls", textContent: "Cast " });
  const select = make("select", control, { id: "cast" });
  for (const r of data.exponents) {
    make("option", select, { value: r.name, textContent: `${r.name}, step ${r.step}`, selected: r === first });
  }
  const domain = [data.lowest, data.lowest + first.share.length];
  const x = { type: "quantitative", scale: { domain }, title: "binary exponent" };
  const view = await plot("exponents", "Binary exponents, and what the formats hold",
    "Thousandths of the numbers by exponent at the step of the finding, or the last. Below: where codes have all their"
    + " digits (dark) and lose them (light); what lies left is flushed, what lies right is clipped.",
    exponentsInWords(first.name),
    { params: [{ name: "row", value: first.name }], vconcat: [histogram(x, width), formatWindows(x, width)] },
    "svg", control);
  select.onchange = () => {
    document.querySelector("#exponents figcaption").textContent = exponentsInWords(select.value);
    return view.signal("row", select.value).runAsync();
  };
}

// --- magnitudes by depth

function plotDepth() {
  const directionOf = row => row.role === "grad_output" ? "backward" : "forward";
  const values = data.casts.filter(row => row.amax !== null)
    .map(row => ({ layer: row.layer, role: row.role, amax: row.amax, direction: directionOf(row) }));
  if (!values.length) return;
  const inWords = direction => {
    const rows = values.filter(row => row.direction === direction).sort((a, b) => a.amax - b.amax);
    const ends = [rows[0], rows.at(-1)];
    return rows.length ? `${direction}: from `
      + `${ends.map(row => `2^${called(row.amax)} (${row.layer} ${row.role})`).join(" to ")}.` : "";
  };
  const { params, narrow, cell, labelExpr } = layout;
  const encoding = {
    x: {
      field: "layer", type: "nominal", sort: null, title: "layer",
      axis: { labelAngle: -40, labelOverlap: "greedy", labelLimit: 130, labelExpr: labelExpr(20) } },
    y: { field: "amax", type: "quantitative", title: "log2 amax", scale: { zero: false } },
    color: { field: "role", scale: { domain: roles, range: colours }, legend: { title: null, orient: "top" } },
    shape: { field: "role", legend: null } };
  const mark = { type: "line", point: true, tooltip: true };
  return plot("amax", "Largest magnitude by depth",
    "log2 of the amax in the last record; layers in the order of the model.",
    ["forward", "backward"].map(inWords).join(" "), {
      params, data: { values }, transform: [{ filter: isShown }],
      facet: { field: "direction", sort: "descending" }, columns: narrow ? 1 : 2,
      resolve: { scale: { y: "independent" } },
      spec: { width: cell(narrow ? 1 : 2, narrow ? 70 : 150), height: 200, mark, encoding } });
}

// --- what if one layer alone is in FP8

const allLayers = "(all layers)";

function effectEncoding(rows) {
  const most = Math.max(1e-3, ...rows.map(row => row.percent));
  const numbers = ["percent", "loss", "cosine", "norm_ratio", "output", "grad_input", "grad_weight"]
    .map(field => ({ field, type: "quantitative", format: ".4~g" }));
  return {
    x: {
      field: "percent", type: "quantitative", title: "% of the loss",
      scale: { type: "symlog", constant: 1e-3, domain: [0, most] },
      axis: { values: [0, 1e-3, 1e-2, 0.1, 1, 10, 100], format: "~r", grid: true, labelOverlap: "greedy" } },
    y: { field: "layer", type: "nominal", sort: null, title: null, axis: layout.layerAxis },
    color: {
      field: "known", scale: { domain: ["measured", "estimated"], range: ["#00507f", "#4f97c4"] },
      legend: rows.every(row => row.measured) ? null : { title: null, orient: "top" } },
    tooltip: tooltips(["layer", "recipe", "known", ...numbers]) };
}

function plotWhatIf() {
  if (!data.what_if.length) return;
  const rows = data.what_if.map(row => ({
    ...row, layer: row.layer || allLayers, percent: row.predicted === null ? null : 100 * row.predicted,
    known: row.measured ? "measured" : "estimated" }));
  const recipes = new Set(rows.map(row => row.recipe)), { params, room, labels, cell, rowHeight } = layout;
  const worst = rows.filter(row => row.layer !== allLayers)
    .sort((a, b) => (b.percent ?? Infinity) - (a.percent ?? Infinity))[0];
  const effect = worst && (worst.percent === null ? "not finite" : `${called(worst.percent)} %`);
  const columns = Math.max(1, Math.min(recipes.size, Math.floor((room - labels) / 150)));
  return plot("what-if", "What if: one layer alone in FP8, by recipe",
    "How much higher the trained model's loss is predicted to be, against high precision; logarithmic, and linear below"
    + " 0.001 %. Without a bar: the loss or the gradient is not finite.",
    worst ? `Worst: ${worst.layer} under ${worst.recipe}, ${effect}.` : "", {
      params, data: { values: rows }, transform: [{ filter: `${isShown} || datum.layer == '${allLayers}'` }],
      facet: { field: "recipe", sort: [...recipes] }, columns, spacing: 14,
      spec: {
        width: Math.min(400, cell(columns, labels + 20)), height: { step: Math.max(9, rowHeight) },
        mark: { type: "bar", tooltip: true }, encoding: effectEncoding(rows) } });
}

// --- drawing all of them

async function draw() {
  document.body.dataset.ready = "no";
  plots.style.minHeight = `${plots.offsetHeight}px`; // so that the page stays where it was scrolled to
  layout = layoutNow();
  views = [];
  plots.replaceChildren();
  for (const drawOne of [
    plotLoss, plotTwin, plotAgainst, plotFlushed, plotClipped, plotSqnr, plotStaleness, plotLoads, plotExponents,
    plotDepth, plotResolution, plotWhatIf]) await drawOne();
  plots.style.minHeight = "";
  document.body.dataset.ready = "yes";
}

filter.oninput = () => {
  const text = filter.value.toLowerCase();
  for (const row of body.children) row.hidden = !row.layers.some(layer => layer.includes(text));
  countRowsBelow();
  const count = `${visibleRows().length} of ${many(data.findings.length, "finding")}`;
  document.getElementById("shown").textContent = text && count;
  for (const view of views) {
    try { view.signal("layers", text).resize().runAsync(); } catch { /* a plot of all layers */ }
  }
};

fillHeader();
fillTable();
await draw();
fillNavigation();
let waiting = 0, drawing = Promise.resolve();
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (plots.clientWidth !== layout.room) drawing = drawing.then(draw); }, 200);
});
