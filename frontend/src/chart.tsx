/** One metric of several runs: the values as they were logged, faint, and smoothed ones above them. */
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number, tick } from "./format";
import type { Curve } from "./store";
import { useTheme } from "./theme";

export interface Line {
  name: string;
  place: number; // of its colour
  curve: Curve;
}

const FEW = 20; // of so few values, every one counts

/** Exponential moving average, corrected for its start as Adam's are, so that the first values are not pulled to 0. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  if (weight === 0 || values.length < FEW) return values;
  let sum = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

export function colourOf(place: number): string {
  return getComputedStyle(document.documentElement)
    .getPropertyValue(`--run-${place % 8}`)
    .trim();
}

const cursors = uPlot.sync("metrics");

interface Props {
  title: string;
  lines: Line[];
  smoothing: number;
  log: boolean;
  height: number;
  onOpen?: () => void;
}

function tablesOf(lines: Line[], smoothing: number, log: boolean): uPlot.AlignedData {
  const drawable = (values: (number | null)[]) => (log ? values.map((v) => (v !== null && v > 0 ? v : null)) : values);
  const tables = lines.map(({ curve }) => {
    const raw = drawable(curve.values);
    return smoothing ? [curve.steps, raw, drawable(smoothed(curve.values, smoothing))] : [curve.steps, raw];
  });
  return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables as uPlot.AlignedData[]);
}

function seriesOf(lines: Line[], smoothing: number): uPlot.Series[] {
  const drawn = lines.flatMap(({ name, place, curve }) => {
    const colour = colourOf(place);
    const main = { label: name, stroke: colour, width: 1.5, spanGaps: true, points: { show: curve.steps.length < 3, size: 5 } };
    return smoothing ? [{ ...main, stroke: `${colour}55`, width: 1 }, main] : [main];
  });
  return [{}, ...drawn];
}

function optionsOf(props: Props, width: number, onHover: (place: number | null) => void): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--faint").trim();
  const rule = style.getPropertyValue("--rule").trim();
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: ink, font, grid: { stroke: rule, width: 1 }, ticks: { show: false }, gap: 4 };
  return {
    width,
    height: props.height,
    legend: { show: false },
    padding: [6, 8, 0, 0],
    cursor: { sync: { key: cursors.key }, points: { size: 5 }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: props.log ? 3 : 1 } },
    axes: [
      { ...axis, size: 22, space: 60, grid: { show: false }, values: (_, marks) => marks.map((mark) => tick(mark)) },
      { ...axis, size: 46, space: 32, values: (_, marks) => marks.map((mark) => (mark === null ? "" : tick(mark))) },
    ],
    series: seriesOf(props.lines, props.smoothing),
    hooks: { setCursor: [(plot) => onHover(plot.cursor.idx ?? null)] },
  };
}

export function Chart(props: Props) {
  const { title, lines, smoothing, log } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [isSeen, setSeen] = useState(false);
  const [hover, setHover] = useState<number | null>(null);
  const theme = useTheme();

  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => entry.isIntersecting && setSeen(true), { rootMargin: "200px" });
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);

  // A new plot when its shape changes; new numbers in the old one while a run goes on, so that zoom and cursor stay.
  const shape = [
    theme,
    log,
    smoothing > 0,
    props.height,
    ...lines.map((line) => `${line.place}${line.name}${line.curve.steps.length < 3}`),
  ].join("|");
  useEffect(() => {
    if (!isSeen || !lines.length) return;
    const element = box.current!;
    const made = new uPlot(optionsOf(props, element.clientWidth, setHover), tablesOf(lines, smoothing, log), element);
    plot.current = made;
    const sizes = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: props.height }));
    sizes.observe(element);
    return () => {
      sizes.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [isSeen, shape]);
  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    const [least, most] = [made.data[0][0], made.data[0].at(-1)];
    const isZoomed = made.scales.x.min !== least || made.scales.x.max !== most;
    made.setData(tablesOf(lines, smoothing, log), !isZoomed);
    if (isZoomed) made.redraw();
  }, [lines, smoothing]);

  const perLine = smoothing ? 2 : 1;
  const steps = plot.current?.data[0];
  const readings = lines.map((line, i) => {
    const last = line.curve.values.findLast((value) => value !== null);
    const at = hover === null ? undefined : plot.current?.data[(i + 1) * perLine]?.[hover];
    return { ...line, value: hover === null ? last : (at ?? null) };
  });
  return (
    <figure class="chart">
      <figcaption>
        <button class="plain chart-title" title="Enlarge" onClick={props.onOpen}>
          {title}
        </button>
        <span class="readout">
          {hover !== null && steps ? <span class="faint">step {number(steps[hover])}</span> : null}
          {readings.map((reading) => (
            <span key={reading.name} class={`value run-ink-${reading.place % 8}`}>
              {number(reading.value)}
            </span>
          ))}
        </span>
      </figcaption>
      <div
        ref={box}
        class="plot"
        role="img"
        aria-label={`${title}: ${readings.map((r) => `${r.name} ${number(r.value)}`).join(", ")}`}
      />
    </figure>
  );
}
