"use strict";
// One panel of curves: hover or arrow keys read values, rectangles, keys and buttons zoom, the legend hides lines.
const Chart = (() => {
  const SIZE = { height: 270, left: 58, right: 10, top: 12, bottom: 38 };
  const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const digits = (value, count = 6) => String(Number(value.toPrecision(count))).replace("-", "−");

  // Round numbers, at most about `most` of them.
  function ticks([low, high], most, log) {
    if (log) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const step of high / low > 300 ? [1] : [1, 2, 5]) found.push(step * 10 ** power);
      return found.filter((value) => value >= low && value <= high);
    }
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((some) => some * power >= rough) * power;
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }

  function extent(values) {
    const found = values.filter((value) => value !== null && value !== undefined);
    return [Math.min(...found), Math.max(...found)];
  }

  class Chart {
    constructor(panel) {
      this.panel = panel;
      this.hidden = new Set();
      this.highlight = "";
      this.cursor = null;
      this.element = document.createElement("figure");
      this.element.className = "chart";
      this.element.innerHTML = `<figcaption><span>${escaped(panel.y)}</span><span class="tools">
        <button type="button" data-do="in" aria-label="zoom in">+</button><button type="button" data-do="out" aria-label="zoom out">−</button>
        <button type="button" data-do="fit">fit</button><button type="button" data-do="all">all</button></span></figcaption>
        <div class="plot" tabindex="0" role="application" aria-label="${escaped(panel.y)} by ${escaped(panel.x)}: arrow keys read values, plus and minus zoom, 0 goes back"></div>
        <div class="legend">${panel.lines.map((line, i) => `<button type="button" data-line="${i}" aria-pressed="true" class="${line.paper ? "paper" : ""}" style="--c:${line.colour}"><i></i>${escaped(line.label)}</button>`).join("")}</div>`;
      this.plot = this.element.querySelector(".plot");
      this.xs = [...new Set(panel.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      this.fit(false);
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    // All x; all y, or those after the first tenth of the x, which would hide later differences.
    fit(everything) {
      const [low, high] = extent(this.xs), after = everything || high < 10 ? low : this.panel.log ? low : high / 10;
      const seen = this.panel.lines.filter((_, i) => !this.hidden.has(i)).flatMap((line) =>
        line.x.flatMap((x, i) => (x >= after || line.x.length === 1 || this.skipped(line, i, everything) ? [line.mean[i], line.low?.[i], line.high?.[i]] : [])));
      let [bottom, top] = extent(seen.length ? seen : [0, 1]);
      const margin = 0.06 * (top - bottom) || 0.1 * Math.abs(top) || 1;
      this.x = low < high ? [low, high] : [low - 1, high + 1];
      this.y = [bottom - margin, top + margin];
      this.draw();
    }

    // Against seconds a tenth of the points of each line is left out, not a tenth of the longest line's time.
    skipped(line, i, everything) { return everything || (this.panel.log && i >= line.x.length / 10); }

    zoom(factor, at = this.cursor) {
      const centre = at !== null && at >= this.x[0] && at <= this.x[1] ? at : this.panel.log ? Math.sqrt(this.x[0] * this.x[1]) : (this.x[0] + this.x[1]) / 2;
      const inside = this.panel.lines.filter((_, i) => !this.hidden.has(i)).map((line) => this.nearest(line, centre)).filter((i) => i !== null);
      const values = inside.map(([line, i]) => line.mean[i]);
      const middle = values.length ? values.reduce((a, b) => a + b) / values.length : (this.y[0] + this.y[1]) / 2;
      const around = (range, value) => range.map((end) => value + (end - value) * factor);
      this.x = this.panel.log ? this.x.map((end) => centre * (end / centre) ** factor) : around(this.x, centre);
      this.y = around(this.y, Math.min(Math.max(middle, this.y[0]), this.y[1]));
      this.draw();
    }

    nearest(line, x) {
      if (line.x.length === 1) return [line, 0];
      let best = 0;
      line.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(line.x[best] - x)) best = i; });
      return line.mean[best] === null ? null : [line, best];
    }

    scale() {
      const width = this.plot.clientWidth || 480, { height, left, right, top, bottom } = SIZE, log = this.panel.log;
      const f = log ? Math.log : (v) => v, [a, b] = this.x.map(f), [c, d] = this.y;
      return {
        width, x: (v) => left + ((f(v) - a) / (b - a)) * (width - left - right), y: (v) => height - bottom - ((v - c) / (d - c)) * (height - top - bottom),
        toX: (px) => { const v = a + ((px - left) / (width - left - right)) * (b - a); return log ? Math.exp(v) : v; },
        toY: (py) => c + ((height - bottom - py) / (height - top - bottom)) * (d - c),
      };
    }

    draw() {
      const { width, x, y } = this.scale(), { height, left, right, top, bottom } = SIZE;
      const frame = { right: width - right, bottom: height - bottom };
      const id = (this.id ??= `clip${Chart.count = (Chart.count || 0) + 1}`);
      const path = (xs, ys) => { let pen = "M"; return xs.map((v, i) => { if (ys[i] === null) { pen = "M"; return ""; } const to = `${pen}${x(v).toFixed(1)} ${y(ys[i]).toFixed(1)}`; pen = "L"; return to; }).join(""); };
      const series = this.panel.lines.map((line, i) => {
        if (this.hidden.has(i)) return "";
        const single = line.x.length === 1 && line.paper, xs = single ? this.x : line.x, means = single ? [line.mean[0], line.mean[0]] : line.mean;
        const known = line.low ? line.x.map((_, j) => j).filter((j) => line.low[j] !== null && line.high[j] !== null) : [];
        const ends = known.map((j) => line.x[j]);
        const band = known.length > 1 && !line.paper ? `<path class="band" d="${path([...ends, ...ends.toReversed()], [...known.map((j) => line.low[j]), ...known.toReversed().map((j) => line.high[j])])}Z"/>` : "";
        const dots = !line.paper && line.x.length <= 30 ? line.x.map((v, j) => line.mean[j] === null ? "" : `<circle cx="${x(v).toFixed(1)}" cy="${y(line.mean[j]).toFixed(1)}" r="2"/>`).join("") : "";
        return `<g class="series${line.paper ? " paper" : ""}${this.highlight && this.highlight !== line.sorter ? " dim" : ""}" style="--c:${line.colour}">${band}<path class="mean" d="${path(xs, means)}"/>${dots}</g>`;
      }).join("");
      const across = ticks(this.x, Math.max(3, width / 90), this.panel.log).map((v) => `<line class="grid" x1="${x(v)}" x2="${x(v)}" y1="${top}" y2="${frame.bottom}"/><text x="${x(v)}" y="${frame.bottom + 16}" text-anchor="middle">${digits(v)}</text>`);
      const up = ticks(this.y, 5).map((v) => `<line class="${v === 0 ? "zero" : "grid"}" x1="${left}" x2="${frame.right}" y1="${y(v)}" y2="${y(v)}"/><text x="${left - 7}" y="${y(v) + 4}" text-anchor="end">${digits(v)}</text>`);
      this.plot.querySelector("svg")?.remove();
      this.plot.insertAdjacentHTML("afterbegin", `<svg viewBox="0 0 ${width} ${height}" height="${height}" aria-hidden="true"><clipPath id="${id}"><rect x="${left}" y="${top}" width="${Math.max(0, frame.right - left)}" height="${frame.bottom - top}"/></clipPath>
        ${up.join("")}${across.join("")}<g clip-path="url(#${id})">${series}</g><text x="${(left + frame.right) / 2}" y="${height - 4}" text-anchor="middle">${escaped(this.panel.x)}</text><g class="mark"></g></svg>`);
      this.point();
    }

    // The cursor: a line, and the values of all lines beside it.
    point() {
      const mark = this.plot.querySelector(".mark");
      this.plot.querySelector(".tip")?.remove();
      mark.innerHTML = "";
      if (this.cursor === null || this.cursor < this.x[0] || this.cursor > this.x[1]) return;
      const { x, y, width } = this.scale(), at = x(this.cursor);
      const found = this.panel.lines.filter((_, i) => !this.hidden.has(i)).map((line) => this.nearest(line, this.cursor)).filter(Boolean);
      const near = found.filter(([line, i]) => line.x.length === 1 || Math.abs(x(line.x[i]) - at) < Math.max(12, width / 40));
      mark.innerHTML = `<line class="cursor" x1="${at}" x2="${at}" y1="${SIZE.top}" y2="${SIZE.height - SIZE.bottom}"/>` + near.filter(([line, i]) => line.x.length > 1 && line.mean[i] >= this.y[0] && line.mean[i] <= this.y[1]).map(([line, i]) => `<g class="series" style="--c:${line.colour}"><circle cx="${x(line.x[i])}" cy="${y(line.mean[i])}" r="3.5"/></g>`).join("");
      const half = ([line, i]) => line.low && line.low[i] !== null && line.high[i] !== null ? ` ± ${digits((line.high[i] - line.low[i]) / 2, 2)}` : "";
      this.plot.insertAdjacentHTML("beforeend", `<div class="tip" role="status"><b>${escaped(this.panel.x)} ${digits(this.cursor, 5)}</b><table>${near.sort((a, b) => b[0].mean[b[1]] - a[0].mean[a[1]]).map((some) => `<tr><td>${escaped(some[0].label)}</td><td>${digits(some[0].mean[some[1]])}${half(some)}</td></tr>`).join("")}</table></div>`);
      const tip = this.plot.querySelector(".tip"), wide = tip.offsetWidth; // beside the line, but inside the plot
      tip.style.left = `${Math.max(0, Math.min(width - wide, at > width / 2 ? at - wide - 10 : at + 10))}px`;
    }

    move(by) {
      const inside = this.xs.filter((v) => v >= this.x[0] && v <= this.x[1]);
      if (!inside.length) return;
      const now = this.cursor === null ? (by > 0 ? -1 : inside.length) : inside.findIndex((v) => v >= this.cursor);
      this.cursor = inside[Math.min(inside.length - 1, Math.max(0, now + by))];
      this.point();
    }

    toggle(line, button) {
      if (!this.hidden.delete(line)) this.hidden.add(line);
      button.setAttribute("aria-pressed", String(!this.hidden.has(line)));
      this.draw();
    }

    listen() {
      const actions = { in: () => this.zoom(0.6), out: () => this.zoom(1 / 0.6), fit: () => this.fit(false), all: () => this.fit(true) };
      const keys = { ArrowRight: (n) => this.move(n), ArrowLeft: (n) => this.move(-n), Home: () => this.move(-1e9), End: () => this.move(1e9), "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.fit, a: actions.all, Escape: () => { this.cursor = null; this.fit(false); } };
      this.element.addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (button?.dataset.do) actions[button.dataset.do]();
        else if (button?.dataset.line) this.toggle(Number(button.dataset.line), button);
      });
      this.plot.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
        keys[event.key](event.shiftKey ? 10 : 1);
        event.preventDefault();
      });
      const place = (event) => { const box = this.plot.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      let from = null;
      this.plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) { from = place(event); this.plot.setPointerCapture(event.pointerId); } });
      this.plot.addEventListener("pointermove", (event) => {
        const [px, py] = place(event), at = this.scale().toX(px);
        this.cursor = this.xs.reduce((best, v) => (Math.abs(v - at) < Math.abs(best - at) ? v : best), this.xs[0]);
        this.point();
        if (from) this.plot.querySelector(".mark").insertAdjacentHTML("beforeend", `<rect class="select" x="${Math.min(px, from[0])}" y="${Math.min(py, from[1])}" width="${Math.abs(px - from[0])}" height="${Math.abs(py - from[1])}"/>`);
      });
      this.plot.addEventListener("pointerup", (event) => {
        if (!from) return;
        const [[px, py], [fx, fy], { toX, toY }] = [place(event), from, this.scale()];
        from = null;
        if (Math.abs(px - fx) > 8) this.x = [px, fx].map(toX).sort((a, b) => a - b);
        if (Math.abs(py - fy) > 8) this.y = [py, fy].map(toY).sort((a, b) => a - b);
        this.draw();
      });
      this.plot.addEventListener("pointerleave", () => { if (!from) { this.cursor = null; this.point(); } });
      this.plot.addEventListener("blur", () => { this.cursor = null; this.point(); });
      this.plot.addEventListener("dblclick", actions.fit);
      this.plot.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // without a key the page scrolls
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.scale().toX(place(event)[0]));
      }, { passive: false });
    }
  }
  return Chart;
})();
