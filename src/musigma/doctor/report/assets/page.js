"use strict";

// The figures come as data with colours by name, so that one page reads well on a light and on a dark screen.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function resolved(value, style) {
  if (typeof value === "string") {
    return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
  }
  if (Array.isArray(value)) return value.map((v) => resolved(v, style));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v, style)]));
  }
  return value;
}

function themed(layout, style) {
  const grid = { gridcolor: style.getPropertyValue("--line").trim(), zeroline: false, automargin: true };
  const full = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style.getPropertyValue("--ink").trim(), family: "system-ui, sans-serif", size: 13 },
    margin: { l: 60, r: 16, t: 8, b: 48 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "closest",
    ...resolved(layout, style),
  };
  for (const key of Object.keys(full)) {
    if (/^[xy]axis\d*$/.test(key)) full[key] = { ...grid, ...full[key] };
  }
  return full;
}

async function draw() {
  const style = getComputedStyle(document.documentElement);
  const config = { responsive: true, displayModeBar: false };
  for (const figure of figures) {
    await Plotly.react(figure.id, resolved(figure.traces, style), themed(figure.layout, style), config);
  }
  document.documentElement.dataset.plots = figures.length;
}

async function unpacked(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  await draw();
  dark.addEventListener("change", draw);
}

start().catch((error) => {
  document.getElementById("no-plots").hidden = false;
  console.error("the plots could not be drawn:", error);
});
