"use strict";
// Draws every figure in the colours of the scheme that the reader prefers, and again when that changes.
(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const see_through = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const narrow = () => window.innerWidth < 600;

  function mixed(from, to, share) {
    const part = (hex, n) => parseInt(hex.slice(2 * n + 1, 2 * n + 3), 16);
    const parts = [0, 1, 2].map((n) => Math.round(part(from, n) * (1 - share) + part(to, n) * share));
    return `rgb(${parts.join(",")})`;
  }

  function trace(found) {
    const meta = found.meta || {};
    const own = colour(`--c${(meta.color || 0) % 8}`);
    const copy = JSON.parse(JSON.stringify(found));
    if (copy.type === "bar") {
      copy.marker = { ...copy.marker, color: own };
      return copy;
    }
    if (copy.error_y) copy.error_y.color = own;
    copy.line = { ...copy.line, color: meta.faint ? see_through(own, 0.45) : own };
    if (meta.share !== undefined) copy.line.color = mixed(colour("--line"), own, meta.share);
    copy.marker = { ...copy.marker, color: own };
    if (meta.fill) copy.fillcolor = see_through(own, 0.75);
    return copy;
  }

  function layout(found) {
    const copy = JSON.parse(JSON.stringify(found));
    const text = colour("--text"), quiet = colour("--quiet"), line = colour("--line"), grid = colour("--grid");
    copy.paper_bgcolor = copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.font = { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 12, color: quiet };
    for (const axis of ["xaxis", "yaxis"]) {
      copy[axis] = { ...copy[axis], gridcolor: grid, linecolor: line, tickcolor: line };
    }
    copy.hoverlabel = { bgcolor: colour("--tip"), bordercolor: line, font: { color: text }, namelength: 40 };
    for (const note of copy.annotations || []) note.bgcolor = see_through(colour("--card"), 0.7);
    copy.shapes = (copy.shapes || []).map((shape) => ({
      ...shape,
      line: { ...shape.line, color: colour(shape.name === "failure" ? "--bad" : "--quiet") },
    }));
    if (narrow()) copy.dragmode = false;
    return copy;
  }

  const options = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  const figures = JSON.parse(document.getElementById("figures").textContent);
  function draw() {
    return Promise.all(
      figures.map((figure, index) =>
        Plotly.react(`plot-${index}`, figure.data.map(trace), layout(figure.layout), options)
      )
    );
  }
  const done = () => document.body.setAttribute("data-drawn", String(figures.length));
  draw().then(done);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", draw);
})();
