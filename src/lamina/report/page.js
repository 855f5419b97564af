// The logic of the report page. Every number comes from the JSON in #data; every text from a run is put on the page
// as text (textContent, new Option, forPlotly), never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const visible = data.curves.map(() => true);
const ratesVisible = data.responses.map(() => true);
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SVG_DASHES = ["", "6 4", "2 3", "8 3 2 3"];
const COLOURS = 7;
const LEGEND_ABOVE = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } };
const byTouch = matchMedia("(pointer: coarse)").matches;

// --- colours -------------------------------------------------------------------------------------------------------

/** Colours of the style sheet as "rgb(…)": as on the screen now, or as on paper, for exports. */
function coloursOf(names, place) {
  const probes = names.map((name) => Object.assign(document.createElement("i"), { style: `color: var(--${name})` }));
  place.append(...probes); // all at once: the browser works out styles when the first one is read
  const found = probes.map((probe) => getComputedStyle(probe).color);
  probes.forEach((probe) => probe.remove());
  return found;
}

function palette(onPaper) {
  const place = onPaper ? $("on-paper") : document.body;
  const curves = Array.from({ length: COLOURS }, (_, i) => `curve-${i}`);
  const [paper, ink, soft, line, accent, ...rest] = coloursOf(["paper", "ink", "soft", "line", "accent", ...curves], place);
  return { paper: onPaper ? "#fff" : paper, ink, soft, line, accent, curves: rest };
}

const faint = (rgb, alpha) => rgb.replace(/rgb\((.*)\)/, `rgba($1, ${alpha})`);
const curveColour = (colours, index) => colours.curves[index % COLOURS];
const dashOf = (index) => Math.floor(index / COLOURS) % DASHES.length;

/** Plotly reads some tags in its texts: a name with angle brackets must stay a name. */
const forPlotly = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function baseLayout(colours) {
  const axis = { gridcolor: colours.line, zeroline: false, linecolor: colours.line, ticks: "", automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: innerWidth < 640 ? 11 : 13, color: colours.ink },
    margin: { l: 8, r: 12, t: 12, b: 8 },
    xaxis: { ...axis },
    yaxis: { ...axis },
    hoverlabel: { bgcolor: colours.paper, bordercolor: colours.line, font: { color: colours.ink }, align: "left", namelength: -1 },
    showlegend: false,
    dragmode: byTouch ? false : "zoom", // a finger on the plot scrolls the page
  };
}

// --- statistics over seeds -----------------------------------------------------------------------------------------

const isNumber = (value) => value !== null && value !== undefined;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function std(values) {
  if (values.length < 2) return 0;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

/** Mean over `width` points to each side, fewer at the ends; gaps stay gaps. Centred, so that nothing is delayed. */
function smoothed(values, width) {
  if (!width) return values;
  const places = values.flatMap((value, i) => (isNumber(value) ? [i] : []));
  const result = values.map(() => null);
  places.forEach((place, k) => {
    const reach = Math.min(width, k, places.length - 1 - k);
    result[place] = mean(places.slice(k - reach, k + reach + 1).map((i) => values[i]));
  });
  return result;
}

// --- the curves ----------------------------------------------------------------------------------------------------

function curveTraces(colours) {
  const metric = data.metrics[$("metric").value];
  const axis = $("axis").value;
  const width = Number($("smooth").value);
  const scale = metric.percent ? 100 : 1;
  const perAxis = axis === "bytes" ? data.unit.bytes : 1;
  const traces = [];
  const lines = [];
  data.curves.forEach((curve, index) => {
    if (!visible[index] || !curve.rounds.length) return;
    const seeds = curve.columns[metric.column].map((row) =>
      smoothed(row, width).map((value) => (isNumber(value) ? value * scale : null)));
    const along = (values) => values.map((value) => (isNumber(value) ? value / perAxis : null));
    const x = axis === "round" ? curve.rounds : along(curve.mean[axis]);
    const points = curve.rounds.flatMap((round, i) => {
      const seen = seeds.map((row) => row[i]).filter(isNumber);
      if (!seen.length || !isNumber(x[i])) return [];
      const middle = mean(seen);
      const spread = std(seen);
      const byStd = $("band").value === "std";
      return [{
        x: x[i], y: middle, round, count: seen.length,
        low: byStd ? middle - spread : Math.min(...seen),
        high: byStd ? middle + spread : Math.max(...seen),
      }];
    });
    if (!points.length) return;
    const line = { color: curveColour(colours, index), dash: DASHES[dashOf(index)] };
    if ($("band").value && seeds.length > 1) {
      traces.push({
        x: [...points.map((p) => p.x), ...points.map((p) => p.x).reverse()],
        y: [...points.map((p) => p.high), ...points.map((p) => p.low).reverse()],
        mode: "lines", fill: "toself", fillcolor: faint(line.color, 0.16), line: { width: 0 },
        hoverinfo: "skip", showlegend: false,
      });
    }
    if ($("seeds").checked) {
      seeds.forEach((row, s) => traces.push({
        x: axis === "round" ? curve.rounds : along(curve[axis][s]),
        y: row, mode: "lines", connectgaps: true, line: { ...line, width: 1 }, opacity: 0.55,
        hoverinfo: "skip", showlegend: false,
      }));
    }
    lines.push({
      x: points.map((p) => p.x), y: points.map((p) => p.y), name: forPlotly(curve.label),
      mode: points.length === 1 ? "markers" : "lines", line: { ...line, width: 2.2 }, marker: { color: line.color },
      customdata: points.map((p) => [p.low, p.high, p.round]),
      hovertemplate: "%{fullData.name}: <b>%{y:.4~g}</b>" +
        (seeds.length > 1 && $("band").value ? " [%{customdata[0]:.4~g}, %{customdata[1]:.4~g}]" : "") +
        (axis === "round" ? "" : ", round %{customdata[2]}") + "<extra></extra>",
    });
  });
  return [...traces, ...lines]; // lines above all bands
}

function curveFigure(onPaper) {
  const colours = palette(onPaper);
  const layout = baseLayout(colours);
  const metric = data.metrics[$("metric").value];
  const axis = $("axis").value;
  const logX = $("log-x").checked;
  const logY = $("log-y").checked;
  const few = visible.filter(Boolean).length <= 12;
  Object.assign(layout.xaxis, { title: { text: data.axes[axis] }, type: logX ? "log" : "linear" });
  if (!logX) layout.xaxis.rangemode = "tozero";
  if (axis === "round") layout.xaxis.unifiedhovertitle = { text: "round %{x}" };
  Object.assign(layout.yaxis, { title: { text: forPlotly(metric.title) }, type: logY ? "log" : "linear" });
  if (logX) layout.xaxis.nticks = 8; // else every digit gets a label
  if (logY) layout.yaxis.nticks = 8;
  layout.hovermode = axis === "round" && few ? "x unified" : "closest";
  layout.uirevision = [metric.column, axis, logX, logY].join(); // a zoom outlives everything but a new axis
  return { data: curveTraces(colours), layout };
}

function drawCurves() {
  const width = Number($("smooth").value);
  $("smooth-value").textContent = width ? `± ${width} points` : "off";
  draw("curves-plot", curveFigure);
  const thinned = data.curves.map((curve) => curve.thinned).find(Boolean);
  const several = data.curves.some((curve) => curve.seeds.length > 1);
  $("curves-caption").textContent = [
    several ? "Mean over seeds" + ({ range: "; band: min to max.", std: "; band: ± one standard deviation." }[$("band").value] ?? ".") : "",
    width ? `Each seed smoothed over ± ${width} points.` : "",
    thinned ? `Drawn at ${thinned}; the tables use all.` : "",
  ].filter(Boolean).join(" ");
}

/** Buttons that hide and show lines; Plotly's own legend would be cut where it is long and the screen is narrow. */
function makeLegend(place, lines, shown, redraw) {
  const changed = () => {
    [...place.children].forEach((button, index) => button.setAttribute("aria-pressed", shown[index]));
    redraw();
  };
  lines.forEach((line, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", true);
    button.title = "Click: hide or show. Double click: this one alone, or all.";
    const dash = SVG_DASHES[dashOf(index)];
    button.innerHTML = `<svg width="22" height="6"><line x1="0" x2="22" y1="3" y2="3" stroke-width="3"
      style="stroke: var(--curve-${index % COLOURS})" stroke-dasharray="${dash}"/></svg>`;
    button.append(line.label);
    button.onclick = () => { shown[index] = !shown[index]; changed(); };
    button.ondblclick = () => {
      const alone = shown.every((own, other) => own === (other === index));
      shown.forEach((_, other) => { shown[other] = alone || other === index; });
      changed();
    };
    place.append(button);
  });
}

// --- the cost table ------------------------------------------------------------------------------------------------
// The same numbers, written in the same way, as cost_table in tables.py.

const fixed = (value, digits = 1) =>
  Number.isNaN(value) ? "–" : Number.isFinite(value) ? value.toFixed(digits) : "∞";

function significant(value, digits = 3) {
  if (value === 0 || !Number.isFinite(value)) return fixed(value, 0);
  return value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
}

/** Means of rounds, bytes and seconds, NaN if a seed does not stay at the target; `steps` and `touches`: see page.py. */
function costToTarget(curve, target) {
  const reaches = data.judged.smaller_is_better ? (step) => step[1] <= target : (step) => step[1] >= target;
  const firsts = (seeds) => seeds.map((steps) => steps.find(reaches)).filter(Boolean);
  const reached = firsts(curve.steps);
  const take = (steps, place) =>
    (steps.length && steps.length === curve.steps.length ? mean(steps.map((step) => step[place] ?? NaN)) : NaN);
  return {
    reached: reached.length, seeds: curve.steps.length, touch: take(firsts(curve.touches), 0),
    costs: [0, 2, 3, 4].map((place) => take(reached, place)),
  };
}

const roundsText = (rounds, limit) =>
  (Number.isNaN(rounds) && limit ? `not within ${limit} round${limit === 1 ? "" : "s"}` : fixed(rounds));

const perTarget = data.judged.percent ? 100 : 1; // accuracies are typed and shown in per cent
const isTarget = (typed) => (data.judged.percent ? typed > 0 && typed <= 100 : Number.isFinite(typed));

const hasClock = "clock_seconds" in data.axes;

/** The rows of the cost table: for every target, in per cent where accuracies are, one for each curve. */
function costRows(targets, baseline) {
  return [...new Set(targets)].sort((a, b) => a - b).flatMap((target) => {
    const found = data.curves.map((curve) => costToTarget(curve, target / perTarget));
    return found.map((one, index) => {
      const cells = [`${target}${data.judged.percent ? "%" : ""}`, data.curves[index].label, `${one.reached}/${one.seeds}`];
      [1, data.unit.bytes, 1, ...(hasClock ? [1] : [])].forEach((scale, place) => {
        const other = found[baseline].costs[place];
        const times = other > 0 ? one.costs[place] / other : NaN;
        const { limit } = data.curves[index];
        cells.push(place ? significant(one.costs[place] / scale) : roundsText(one.costs[place], limit), significant(times));
        if (!place) cells.push(roundsText(one.touch, limit));
      });
      return cells;
    });
  });
}

function drawTargets() {
  const words = $("target-list").value.split(/[,;\s]+/).filter(Boolean);
  const refused = words.filter((word) => !isTarget(Number(word)));
  $("target-list").setAttribute("aria-invalid", refused.length > 0);
  const bounds = data.judged.percent ? "above 0 and up to 100" : "numbers";
  $("target-problem").textContent = refused.length ? `not used: ${refused.join(", ")} (targets are ${bounds})` : "";
  const baseline = Number($("baseline").value);
  const ratio = "× baseline";
  const head = ["target", "curve", "reached", "rounds", ratio, "first touch", data.unit.name, ratio, "seconds", ratio,
    ...(hasClock ? ["clock s", ratio] : [])];
  const rows = costRows(words.map(Number).filter(isTarget), baseline);
  const table = document.querySelector("[data-name='cost-to-target'] table");
  table.tHead.replaceChildren(tableRow("th", head));
  table.tBodies[0].replaceChildren(...rows.map((cells, i) => {
    const row = tableRow("td", cells);
    const place = i % data.curves.length;
    row.classList.toggle("baseline", place === baseline);
    row.classList.toggle("last", place === data.curves.length - 1);
    row.cells[0].classList.toggle("repeated", place > 0);
    return row;
  }));
  markColumns(table);
}

function tableRow(tag, cells) {
  const row = document.createElement("tr");
  row.append(...cells.map((text) => Object.assign(document.createElement(tag), { textContent: text })));
  return row;
}

// --- tables as CSV and LaTeX: the same as in tables.py ----------------------------------------------------------------

const NUMBER = /^([-+]?[\d.]+%?|\d+\/\d+|[∞–]|[-+]?[\d.]+ ± [\d.]+|[-+][\d.]+ \[[-+\d., ]+\]|not within \d+ rounds?)$/;
const INTERVAL = /^([-+][\d.]+) \[([-+][\d.]+), ([-+][\d.]+)\]$/;
const LATEX = {
  "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "$": "\\$", "&": "\\&", "#": "\\#", "%": "\\%", "_": "\\_",
  "^": "\\textasciicircum{}", "~": "\\textasciitilde{}", "<": "\\textless{}", ">": "\\textgreater{}",
  "|": "\\textbar{}", '"': "\\textquotedbl{}", "±": "$\\pm$", "∞": "$\\infty$", "×": "$\\times$", "–": "--", "\n": " ",
};

const textsOf = (row) => [...row.cells].map((cell) => cell.textContent);
const headOf = (table) => textsOf(table.tHead.rows[0]);
const rowsOf = (table) => [...table.tBodies[0].rows].map(textsOf);
const isNumeric = (rows, column) => rows.length > 0 && rows.every((row) => NUMBER.test(row[column]));

function csvOf(table) {
  const head = headOf(table);
  const rows = rowsOf(table);
  const suffixes = head.map((_, i) => (rows.some((row) => row[i].includes(" ± ")) ? ["", ", std"]
    : rows.some((row) => INTERVAL.test(row[i])) ? ["", ", low", ", high"] : [""]));
  const plain = (cell) => (cell.startsWith("not within ") ? "" : ({ "∞": "inf", "–": "" })[cell] ?? cell);
  // a spreadsheet takes text that begins so for a formula
  const harmless = (cell) => (/^[-=+@]/.test(cell) && Number.isNaN(Number(cell)) ? `'${cell}` : cell);
  const quoted = (cell) => (/[",\n\r]/.test(cell) ? `"${cell.replace(/"/g, '""')}"` : cell);
  const lines = [head.flatMap((name, i) => suffixes[i].map((suffix) => name + suffix))];
  for (const row of rows) {
    lines.push(row.flatMap((cell, i) => {
      const parts = INTERVAL.exec(cell)?.slice(1) ?? (suffixes[i].length === 2 ? cell.split(" ± ") : [cell]);
      return suffixes[i].map((_, k) => plain(parts[k] ?? ""));
    }));
  }
  return lines.map((line) => line.map(harmless).map(quoted).join(",") + "\n").join("");
}

function latexOf(table) {
  const rows = rowsOf(table);
  const head = headOf(table);
  const written = (cells) => cells.map((cell) => [...cell].map((c) => LATEX[c] ?? c).join("")).join(" & ") + " \\\\";
  const grouped = new Set(rows.map((row) => row[0])).size < rows.length;
  return [
    "% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}",
    `\\begin{tabular}{${head.map((_, i) => (isNumeric(rows, i) ? "r" : "l")).join("")}}`,
    "\\toprule", written(head), "\\midrule",
    ...rows.flatMap((row, i) =>
      grouped && i && row[0] !== rows[i - 1][0] ? ["\\midrule", written(row)] : [written(row)]),
    "\\bottomrule", "\\end{tabular}", "",
  ].join("\n");
}

/** Numbers to the right, ratios soft, long texts folded. */
function markColumns(table) {
  const rows = rowsOf(table);
  headOf(table).forEach((heading, i) => {
    for (const row of table.rows) {
      row.cells[i].classList.toggle("number", i > 0 && isNumeric(rows, i));
      row.cells[i].classList.toggle("ratio", heading.startsWith("×"));
      row.cells[i].classList.toggle("long", row.cells[i].textContent.length > 40);
    }
  });
}

// --- learning rates ------------------------------------------------------------------------------------------------

function ratesFigure(onPaper) {
  const colours = palette(onPaper);
  const layout = baseLayout(colours);
  const on = [...new Set(data.responses.map((response) => response.on))].join(" or ");
  const rates = data.responses.flatMap((response) => response.tried.map((tried) => tried.lr));
  Object.assign(layout.xaxis, { title: { text: "learning rate" }, type: "log", exponentformat: "none" });
  if (Math.max(...rates) > 100 * Math.min(...rates)) layout.xaxis.dtick = 1; // powers of ten are enough
  const names = new Set(data.responses.map((response) => response.heading));
  layout.yaxis.title = { text: `final ${on} ${[...names].join(" or ")}` };
  layout.hovermode = "closest";
  const traces = data.responses.flatMap((response, index) => {
    if (!ratesVisible[index]) return [];
    const line = { color: curveColour(colours, index), dash: DASHES[dashOf(index)], width: 2 };
    const percent = response.percent;
    const points = response.tried
      .map((tried) => ({ ...tried, final: tried.final.filter(isNumber).map((value) => (percent ? 100 : 1) * value) }))
      .filter((tried) => tried.final.length)
      .map((tried) => ({ ...tried, y: mean(tried.final) }));
    const label = forPlotly(response.label);
    const trace = (kept, more) => ({
      x: kept.map((p) => p.lr), y: kept.map((p) => p.y), customdata: kept.map(said), hovertemplate: hover,
      legendgroup: String(index), name: label, ...more,
    });
    const finished = points.filter((p) => !p.failed);
    const best = finished.filter((p) => p.lr === response.chosen);
    const score = percent ? "<b>%{y:.2f}</b> %" : "<b>%{y:.4g}</b>";
    const hover = `%{fullData.name}<br>rate %{x}%{customdata}: ${score}<extra></extra>`;
    const said = (p) => forPlotly([p.others, p.failed].filter(Boolean).map((text) => `, ${text}`).join(""));
    return [
      trace(finished, {
        mode: "lines+markers", line, marker: { size: 6 },
        error_y: {
          type: "data", symmetric: false, thickness: 1, width: 0,
          array: finished.map((p) => Math.max(...p.final) - p.y), arrayminus: finished.map((p) => p.y - Math.min(...p.final)),
        },
      }),
      trace(points.filter((p) => p.failed), {
        mode: "markers", marker: { symbol: "x-thin", size: 9, line: { width: 2, color: line.color } },
        showlegend: false,
      }),
      trace(best, {
        mode: "markers", marker: { symbol: "circle-open", size: 15, color: line.color, line: { width: 1.5 } },
        hoverinfo: "skip", hovertemplate: "", showlegend: false,
      }),
    ];
  });
  return { data: traces, layout };
}

// --- the partition -------------------------------------------------------------------------------------------------

function partitionFigure(onPaper) {
  const colours = palette(onPaper);
  const layout = baseLayout(colours);
  const counts = data.partitions[$("partition-choice").value].counts;
  const clients = counts.map((_, i) => i);
  const kinds = counts[0].map((_, i) => i);
  const sizes = counts.map((row) => row.reduce((sum, n) => sum + n, 0));
  const gap = counts.length <= 120 ? 1.5 : 0;
  const byClass = kinds.map((kind) => counts.map((row) => row[kind]));
  const traces = [{
    type: "bar", x: clients, y: sizes, yaxis: "y2", marker: { color: faint(colours.accent, 0.55) },
    hovertemplate: "client %{x}: %{y} samples<extra></extra>",
  }];
  if (kinds.length > 1) {
    traces.push({
      // a square-root scale keeps a handful of samples visible beside thousands
      type: "heatmap", x: clients, y: kinds, z: byClass.map((row) => row.map(Math.sqrt)), customdata: byClass,
      colorscale: [[0, faint(colours.accent, 0.05)], [1, colours.accent]], showscale: false, xgap: gap, ygap: gap,
      hovertemplate: "client %{x}, class %{y}: %{customdata} samples<extra></extra>",
    });
  }
  const split = kinds.length > 1 ? 0.78 : 0;
  layout.yaxis2 = { ...layout.yaxis, title: { text: "samples" }, domain: [split ? split + 0.04 : 0, 1], nticks: 3 };
  Object.assign(layout.yaxis, { title: { text: "class" }, domain: [0, split || 1], autorange: "reversed", showgrid: false, visible: split > 0 });
  if (kinds.length <= 20) layout.yaxis.dtick = 1;
  Object.assign(layout.xaxis, { title: { text: "client" }, showgrid: false });
  layout.bargap = 0.15;
  return { data: traces, layout };
}

function drawPartition() {
  draw("partition-plot", partitionFigure);
  $("partition-caption").textContent = data.partitions[$("partition-choice").value].title;
}

// --- figures and files ---------------------------------------------------------------------------------------------

const figures = { curves: curveFigure, "learning-rates": ratesFigure, partition: partitionFigure };

function draw(id, figure) {
  if (!window.Plotly) return; // a control was touched while the page was loading
  const { data: traces, layout } = figure(false);
  Plotly.react(id, traces, layout, { responsive: true, displayModeBar: false, doubleClick: "reset" });
}

function download(name, url) {
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
}

/** The figure as on paper: white, with a legend, whatever the screen looks like. */
async function imageOf(name, format) {
  const { data: traces, layout } = figures[name](true);
  Object.assign(layout, { paper_bgcolor: "#fff", plot_bgcolor: "#fff", showlegend: name !== "partition" });
  layout.legend = LEGEND_ABOVE;
  layout.margin = { l: 16, r: 24, t: 24, b: 16 };
  return Plotly.toImage({ data: traces, layout }, { format, width: 900, height: 540, scale: format === "png" ? 3 : 1 });
}

function addExports() {
  const bar = (after, buttons) => {
    const made = Object.assign(document.createElement("div"), { className: "export" });
    for (const [text, action] of buttons) {
      made.append(Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: action }));
    }
    after.append(made);
  };
  for (const figure of document.querySelectorAll("figure")) {
    const name = figure.dataset.name;
    const save = (format) => async () => download(`${name}.${format}`, await imageOf(name, format));
    bar(figure, [["PNG", save("png")], ["SVG", save("svg")]]);
  }
  for (const place of document.querySelectorAll(".table")) {
    const table = place.querySelector("table");
    const save = (ending, kind, write) => () => {
      const url = URL.createObjectURL(new Blob([write(table)], { type: kind }));
      download(`${place.dataset.name}.${ending}`, url);
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    };
    const made = document.createElement("div");
    place.after(made);
    bar(made, [["CSV", save("csv", "text/csv", csvOf)], ["LaTeX", save("tex", "text/plain", latexOf)]]);
    if (table.tHead.rows.length) markColumns(table);
  }
}

// --- light and dark ------------------------------------------------------------------------------------------------

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemIsDark.matches;
}

function drawOthers() {
  if (data.responses.length) draw("rates-plot", ratesFigure);
  if (data.partitions.length) drawPartition();
}

function recolour() {
  $("theme").textContent = isDark() ? "Light" : "Dark";
  drawCurves();
  drawOthers();
}

function switchTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try { localStorage.setItem("lamina-theme", chosen); } catch { /* a browser may forbid storage */ }
  recolour();
}

// --- start ---------------------------------------------------------------------------------------------------------

function hideUnlessFilled(id, filled) {
  $(id).hidden = !filled;
  document.querySelector(`nav a[href="#${id}"]`).hidden = !filled;
}

function start() {
  data.metrics.forEach((metric, i) => $("metric").add(new Option(metric.title, i)));
  Object.entries(data.axes).forEach(([axis, title]) => $("axis").add(new Option(title, axis)));
  data.curves.forEach((curve, i) => $("baseline").add(new Option(curve.label, i)));
  data.partitions.forEach((one, i) => $("partition-choice").add(new Option(one.title, i)));
  $("baseline").value = data.baseline;
  $("target-list").value = data.targets.map((target) => Number((perTarget * target).toPrecision(12))).join(", ");
  $("partition-choice").form.hidden = data.partitions.length < 2;
  hideUnlessFilled("targets", data.curves.some((curve) => curve.touches.some((steps) => steps.length)));
  hideUnlessFilled("rates", data.responses.length);
  hideUnlessFilled("partition", data.partitions.length);

  for (const form of document.querySelectorAll("form")) form.onsubmit = () => false;
  for (const id of ["metric", "axis", "band", "log-x", "log-y", "seeds", "smooth"]) $(id).oninput = drawCurves;
  for (const id of ["target-list", "baseline"]) $(id).oninput = drawTargets;
  $("partition-choice").oninput = drawPartition;
  $("theme").textContent = isDark() ? "Light" : "Dark";
  $("theme").onclick = switchTheme;
  systemIsDark.addEventListener("change", recolour);

  drawTargets();
  addExports();
  makeLegend($("legend"), data.curves, visible, drawCurves);
  makeLegend($("rates-legend"), data.responses, ratesVisible, () => draw("rates-plot", ratesFigure));
}

/** Called when Plotly is there: it is large, and the tables need not wait for it. */
function drawFigures() {
  drawCurves();
  // what is further down can wait until the first figure is on the screen
  requestAnimationFrame(() => setTimeout(drawOthers));
}

start();
