// uPlot as a component: it is made once, and fed with what has changed.
import { html, useEffect, useLayoutEffect, useRef } from "./vendor/htm-preact-3.1.1.js";
import { settings } from "./settings.js";
import { useStore } from "./store.js";

function themeOf(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = `11px ${style.fontFamily}`;
  return {
    ink: colour("ink"),
    promised: colour("promised"),
    late: colour("late"),
    second: colour("second"),
    axis: (more) => ({
      stroke: colour("ink-3"),
      font,
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      gap: 4,
      size: 28,
      ...more,
    }),
  };
}

// `build(theme)` makes uPlot's options, without size; `data` is uPlot's: columns, the first of them x.
export function Chart({ label, build, data, height }) {
  const { theme } = useStore(settings);
  const holder = useRef(null);
  const plot = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  useLayoutEffect(() => {
    const element = holder.current;
    const options = { cursor: { show: false }, padding: [6, 10, 0, 0], ...build(themeOf(element)) };
    plot.current = new uPlot({ ...options, width: element.clientWidth || 300, height }, latest.current, element);
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [theme, height]);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${holder}></div>`;
}
