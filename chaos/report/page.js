// Draws the plots of a report from the values in it. Nothing is fetched; a plot that has nothing to show says so.
"use strict";
(() => {
  const values = JSON.parse(document.getElementById("figures").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const STAGES = ["detect", "break", "decide", "regroup", "restore", "resume", "rework"];
  const PARTS = { steps: "--restore", "start-up": "--resume", recovery: "--fault", "done again": "--detect", other: "--break" };

  const make = (tag, attributes = {}, text) => {
    const one = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const box = (className, text) => {
    const one = document.createElement("div");
    if (className) one.className = className;
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const short = (value) => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(5));
  const time = (ms) => ms < 1000 ? `${+ms.toPrecision(3)} ms` : `${+(ms / 1000).toPrecision(3)} s`;
  const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

  const ticks = (low, high, about) => {
    const raw = (high - low) / Math.max(1, about) || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5].find((one) => one * power >= raw) || 10);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
    return found;
  };

  const keys = (plot, named) => {
    const row = box("keys");
    for (const [name, colour] of named) {
      const key = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = `var(${colour})`;
      key.append(swatch, name);
      row.append(key);
    }
    plot.append(row);
  };

  const hint = (plot, event, text) => {
    let shown = plot.querySelector(".hint");
    if (!text) { if (shown) shown.remove(); return; }
    if (!shown) plot.append(shown = box("hint"));
    shown.textContent = text;
    const area = plot.getBoundingClientRect();
    const x = event.clientX - area.left, y = event.clientY - area.top;
    shown.style.left = `${Math.max(0, Math.min(x + 12, area.width - shown.offsetWidth - 2))}px`;
    shown.style.top = `${y + 16}px`;
  };
  const hinted = (plot, element, text) => {
    element.addEventListener("pointermove", (event) => hint(plot, event, text()));
    element.addEventListener("pointerleave", (event) => hint(plot, event, ""));
  };

  // An x and a y axis, with room for their figures. Scales map values to places.
  const frame = (plot, height, [x0, x1], [y0, y1], label, unit) => {
    const width = Math.max(240, plot.clientWidth);
    const left = 52, right = 12, top = 8, bottom = 34;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    const x = (value) => left + (value - x0) / (x1 - x0 || 1) * (width - left - right);
    const y = (value) => height - bottom - (value - y0) / (y1 - y0 || 1) * (height - top - bottom);
    for (const value of ticks(y0, y1, height / 50)) {
      svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      svg.append(make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    for (const value of ticks(x0, x1, width / 110)) {
      svg.append(make("line", { class: "axis", x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4 }));
      svg.append(make("text", { x: x(value), y: height - bottom + 17, "text-anchor": "middle" }, short(value)));
    }
    svg.append(make("text", { x: width - right, y: height - 3, "text-anchor": "end" }, unit));
    plot.append(svg);
    return { svg, x, y, width, height, left, right, top, bottom, invert: (place) => x0 + (place - left) / (width - left - right) * (x1 - x0) };
  };

  const shade = (at, spans, widen) => {
    const high = at.height - at.bottom - at.top;
    for (const [from, to] of spans) {
      const begin = at.x(from - widen), end = at.x(to + widen);
      at.svg.append(make("rect", { class: "shade", x: begin, width: Math.max(2.5, end - begin), y: at.top, height: high }));
    }
  };

  const cursor = (plot, at, say) => {
    const line = make("line", { class: "cursor", y1: at.top, y2: at.height - at.bottom, visibility: "hidden" });
    at.svg.append(line);
    at.svg.addEventListener("pointermove", (event) => {
      const place = (event.clientX - at.svg.getBoundingClientRect().left) * at.width / at.svg.getBoundingClientRect().width;
      const text = place < at.left || place > at.width - at.right ? "" : say(at.invert(place));
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
      line.setAttribute("visibility", text ? "visible" : "hidden");
      hint(plot, event, text);
    });
    at.svg.addEventListener("pointerleave", (event) => { line.setAttribute("visibility", "hidden"); hint(plot, event, ""); });
  };

  const near = (rows, value, key) => {
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (key(rows[middle]) <= value) low = middle; else high = middle - 1;
    }
    return rows[low];
  };
  const struck = (faults, value, widen) =>
    faults.filter(([from, to]) => value >= from - widen && value <= to + widen).slice(0, 4).map(([, , fault, number]) => `strike ${number}: ${fault}`);

  const draw = {
    losses(plot, of) {
      const all = [...of.curves.reference, ...of.curves.faulted];
      if (!all.length) return "no step was committed.";
      const low = Math.min(...all.map((one) => one[2])), high = Math.max(...all.map((one) => one[3]));
      const [first, last] = of.steps, pad = (high - low) * 0.04 || Math.abs(high) * 0.04 || 1;
      const named = of.reference ? [["without faults", "--reference"]] : [];
      keys(plot, [...named, ["with faults", "--faulted"], ["a strike, up to the first step afterwards", "--fault"]]);
      const at = frame(plot, 260, [first, Math.max(last, first + 1)], [low - pad, high + pad], "loss of each step in both runs", "step");
      const widen = Math.min(0.5, (last - first) / 400);
      shade(at, of.faults, widen);
      for (const [name, width] of [["reference", 5], ["faulted", 1.5]]) {
        const curve = of.curves[name];
        if (!curve.length) continue;
        const middle = (one) => at.x((one[0] + one[1]) / 2);
        if (of.each > 1) {
          const up = curve.map((one) => `${middle(one)},${at.y(one[3])}`), down = curve.map((one) => `${middle(one)},${at.y(one[2])}`).reverse();
          at.svg.append(make("polygon", { class: "band", fill: `var(--${name})`, opacity: 0.5, points: [...up, ...down].join(" ") }));
        }
        const points = curve.map((one) => `${middle(one)},${at.y((one[2] + one[3]) / 2)}`).join(" ");
        at.svg.append(make("polyline", { class: "curve", stroke: `var(--${name})`, "stroke-width": width, points }));
        if (curve.length === 1) at.svg.append(make("circle", { cx: middle(curve[0]), cy: at.y(curve[0][2]), r: 3, fill: `var(--${name})` }));
      }
      cursor(plot, at, (step) => {
        const lines = [];
        for (const [name, label] of [["reference", "without faults"], ["faulted", "with faults"]]) {
          if (!of.curves[name].length) continue;
          const one = near(of.curves[name], Math.round(step), (row) => row[0]);
          const where = one[0] === one[1] ? `step ${one[0]}` : `steps ${one[0]} to ${one[1]}`;
          if (!lines.length) lines.push(where);
          lines.push(`${label}: ${one[2] === one[3] ? short(one[2]) : `${short(one[2])} to ${short(one[3])}`}`);
        }
        return [...lines, ...struck(of.faults, step, widen)].join("\n");
      });
      if (of.reference) {
        const strip = make("svg", { viewBox: `0 0 ${at.width} 40`, height: 40, role: "img", "aria-label": "difference of the losses" });
        strip.append(make("line", { stroke: "var(--faulted)", "stroke-width": 1.5, x1: at.left, x2: at.width - at.right, y1: 24, y2: 24 }));
        strip.append(make("text", { x: at.left - 6, y: 28, "text-anchor": "end" }, "0"));
        strip.append(make("text", { class: "strong", x: at.left, y: 12 }, of.differ ? `difference: ${many(of.differ, "step")} not the same` : "difference: 0 in every bit"));
        for (const [step] of of.differing) strip.append(make("line", { class: "differs", x1: at.x(step), x2: at.x(step), y1: 14, y2: 34 }));
        plot.append(strip);
      }
      const said = [`${many(of.compared, "step")} compared bit for bit, ${of.differ} differ.`];
      if (of.missing) said.push(`${many(of.missing, "step")} of the other run never came.`);
      if (!of.reference) said.push("The run without faults is not there any more.");
      if (of.differ) said.push(`First: ${of.differing.slice(0, 3).map(([step, a, b]) => `step ${step}: ${b}, and ${a} without faults`).join("; ")}.`);
      if (of.each > 1) said.push(`Each point is ${of.each} steps: their smallest and largest loss.`);
      return said.join(" ");
    },

    progress(plot, of) {
      const all = [...of.curves.reference, ...of.curves.faulted];
      if (!all.length) return "no step was committed.";
      keys(plot, [["without faults", "--reference"], ["with faults", "--faulted"], ["a strike, up to the first step afterwards", "--fault"]]);
      const end = Math.max(...all.map((one) => one[0])), top = Math.max(...all.map((one) => one[1]), 1);
      const first = Math.min(...all.map((one) => one[0])), begin = Math.max(0, first - 0.05 * (end - first));
      const at = frame(plot, 200, [begin, end], [0, top], "committed steps over time in both runs", "seconds since the start");
      shade(at, of.faults, 0);
      for (const [name, width] of [["reference", 4], ["faulted", 1.5]]) {
        const points = of.curves[name].map(([x, y]) => `${at.x(x)},${at.y(y)}`).join(" ");
        if (points) at.svg.append(make("polyline", { class: "curve", stroke: `var(--${name})`, "stroke-width": width, points }));
      }
      cursor(plot, at, (second) => {
        const lines = [`${second.toFixed(2)} s`];
        for (const [name, label] of [["reference", "without faults"], ["faulted", "with faults"]]) {
          const curve = of.curves[name];
          if (curve.length && curve[0][0] <= second) lines.push(`${label}: step ${near(curve, second, (row) => row[0])[1]}`);
        }
        return [...lines, ...struck(of.faults, second, 0)].join("\n");
      });
      return "";
    },

    waterfall(plot, of) {
      if (!of.bars.length) return of.strikes ? "the job did not have to recover from anything." : "nothing was struck.";
      keys(plot, STAGES.filter((stage) => of.bars.some((bar) => bar.stages.some(([name]) => name === stage))).map((stage) => [stage, `--${stage}`]));
      const sum = (bar) => bar.stages.reduce((all, [, ms]) => all + ms, 0);
      const longest = Math.max(...of.bars.map(sum)), row = 36, width = Math.max(240, plot.clientWidth), right = 64;
      const height = of.bars.length * row + 4;
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "stages of each recovery" });
      of.bars.forEach((bar, index) => {
        const y = index * row;
        const title = `#${bar.strike} ${bar.name}${bar.rung ? ` \u2192 ${bar.rung}` : ""}`;
        const most = Math.floor(width / 6.6);
        svg.append(make("text", { class: "strong", x: 0, y: y + 12 }, title.length > most ? `${title.slice(0, most - 1)}\u2026` : title));
        let x = 0;
        for (const [name, ms] of bar.stages) {
          const wide = ms / longest * (width - right);
          const part = make("rect", { x, y: y + 17, width: Math.max(0.7, wide), height: 13, fill: `var(--${name})` });
          hinted(plot, part, () => `${name}: ${time(ms)}\nof ${time(sum(bar))}`);
          svg.append(part);
          x += wide;
        }
        svg.append(make("text", { x: x + 6, y: y + 28 }, time(sum(bar))));
      });
      plot.append(svg);
      return of.all > of.bars.length ? `The ${of.bars.length} longest of ${of.all}; all are in the table of strikes.` : "";
    },

    goodput(plot, of) {
      const rows = [["with faults", of.faulted], ["without", of.reference]].filter(([, parts]) => parts.length);
      if (!rows.length) return "no step was reported.";
      keys(plot, Object.entries(PARTS));
      const width = Math.max(240, plot.clientWidth), row = 40, right = 64;
      const total = (parts) => parts.reduce((all, [, seconds]) => all + seconds, 0);
      const longest = Math.max(...rows.map(([, parts]) => total(parts))) || 1;
      const svg = make("svg", { viewBox: `0 0 ${width} ${rows.length * row}`, height: rows.length * row, role: "img", "aria-label": "where the time of both runs went" });
      rows.forEach(([name, parts], index) => {
        svg.append(make("text", { class: "strong", x: 0, y: index * row + 12 }, name));
        let x = 0;
        for (const [what, seconds] of parts) {
          const wide = seconds / longest * (width - right);
          const part = make("rect", { x, y: index * row + 17, width: wide, height: 16, fill: `var(${PARTS[what]})` });
          hinted(plot, part, () => `${what}: ${time(seconds * 1000)}, ${(100 * seconds / total(parts)).toFixed(1)} %`);
          svg.append(part);
          x += wide;
        }
        svg.append(make("text", { x: x + 6, y: index * row + 30 }, time(total(parts) * 1000)));
      });
      plot.append(svg);
      return "";
    },

    map(plot, of) {
      if (!of.racks.length) return "nobody was seen in any slot.";
      const racks = box("racks");
      for (const { rack, trays } of of.racks) {
        const one = box("rack");
        const title = document.createElement("h3");
        title.textContent = `rack ${rack}`;
        one.append(title);
        for (const { tray, slots } of trays) {
          const row = box("tray"), name = document.createElement("span"), cells = box("slots");
          name.textContent = tray;
          for (const slot of slots) {
            const kinds = ["slot"];
            if (slot.last === null) kinds.push(slot.used ? "spare" : "empty");
            if (slot.strikes) kinds.push("struck");
            if (slot.took.length && slot.last !== null) kinds.push("took");
            const cell = box(kinds.join(" "), `${slot.last === null ? "spare" : slot.last}${slot.strikes ? " \u2717" : ""}`);
            const lines = [slot.slot];
            lines.push(slot.first === null ? "waited at the start" : `rank ${slot.first} at the start`);
            lines.push(slot.last === null ? "no rank at the end" : `rank ${slot.last} at the end`);
            if (slot.strikes) lines.push(`struck ${slot.strikes === 1 ? "once" : `${slot.strikes} times`}: strike ${slot.struck.join(", ")}${slot.strikes > slot.struck.length ? ", \u2026" : ""}`);
            for (const taken of slot.took) lines.push(`took over ${taken}`);
            hinted(plot, cell, () => lines.join("\n"));
            cells.append(cell);
          }
          row.append(name, cells);
          one.append(row);
        }
        racks.append(one);
      }
      plot.append(racks);
      return "Red border and \u2717: struck. Green: took a rank over. Dashed: a spare.";
    },
  };

  Object.assign(draw, window.moreplots || {});
  // Of a campaign: a square for each seed.
  draw.seeds = (plot, of) => {
    if (!of.cells.length) return "no seed has been run.";
    const size = of.cells.length > 2000 ? 9 : 14, width = Math.max(240, plot.clientWidth), across = Math.floor(width / size);
    const height = Math.ceil(of.cells.length / across) * size;
    keys(plot, [["true", "--good"], ["FALSE", "--bad"], ["unknown", "--doubt"]]);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "the verdict of each seed" });
    const colours = { holds: "--good", fails: "--bad", unknown: "--doubt" };
    of.cells.forEach(([, verdict], index) => {
      svg.append(make("rect", {
        x: (index % across) * size, y: Math.floor(index / across) * size, width: size - 2, height: size - 2, rx: 2,
        fill: `var(${colours[verdict]})`, opacity: verdict === "holds" ? 0.55 : 1,
      }));
    });
    svg.addEventListener("pointermove", (event) => {
      const area = svg.getBoundingClientRect();
      const column = Math.floor((event.clientX - area.left) / size), row = Math.floor((event.clientY - area.top) / size);
      const cell = column < across ? of.cells[row * across + column] : undefined;
      hint(plot, event, cell ? cell[2] : "");
    });
    svg.addEventListener("pointerleave", (event) => hint(plot, event, ""));
    plot.append(svg);
    return of.left_out ? `${of.left_out} more are not drawn.` : "";
  };

  const all = () => {
    for (const figure of document.querySelectorAll("figure[data-plot]")) {
      const plot = figure.querySelector(".plot"), name = figure.dataset.plot;
      plot.replaceChildren();
      const said = draw[name](plot, values[name]);
      figure.querySelector(".said").textContent = said;
      figure.dataset.drawn = plot.childElementCount ? "plot" : "nothing";
    }
  };
  let width = 0;
  const again = () => {
    if (document.documentElement.clientWidth !== width) {
      width = document.documentElement.clientWidth;
      all();
    }
  };
  again();
  window.addEventListener("resize", () => requestAnimationFrame(again));
})();
