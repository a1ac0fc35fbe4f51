/** One metric of several runs: the values as they were logged, faint, and smoothed ones above them. */
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number, ticks } from "./format";
import type { Curve } from "./store";
import { useTheme } from "./theme";

export interface Line {
  name: string;
  place: number; // of its colour
  curve: Curve;
}

const FEW = 20; // below so many values, every one counts
export const isSmoothable = (curve: Curve) => curve.values.length >= FEW;
const WHOLE = [1, 2, 5].flatMap((digit) => Array.from({ length: 12 }, (_, i) => digit * 10 ** i)).sort((one, other) => one - other);

/** What an axis spans. Values that are all 0 are drawn at the bottom of 0 to 1; uPlot's own choice is 0 to 100. */
function spanOf(_: uPlot, least: number | null, most: number | null): uPlot.Range.MinMax {
  if (least === null || most === null) return [0, 1];
  return least === 0 && most === 0 ? [-0.05, 1] : uPlot.rangeNum(least, most, 0.1, true);
}

/** Exponential moving average, corrected for its start as Adam's are, so that the first values are not pulled to 0. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  if (weight === 0) return values;
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
  isNamed?: boolean; // lines are told apart by their names, not by the colours of the runs
  onOpen?: () => void;
}

/** One line of every curve, and a smoothed one where there are values enough. */
function tablesOf(lines: Line[], smoothing: number, log: boolean): uPlot.AlignedData {
  const drawable = (values: (number | null)[]) => (log ? values.map((v) => (v !== null && v > 0 ? v : null)) : values);
  const tables = lines.map(({ curve }) => {
    const raw = drawable(curve.values);
    const isSmoothed = smoothing > 0 && isSmoothable(curve);
    return isSmoothed ? [curve.steps, raw, drawable(smoothed(curve.values, smoothing))] : [curve.steps, raw];
  });
  return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables as uPlot.AlignedData[]);
}

function seriesOf(lines: Line[], smoothing: number): uPlot.Series[] {
  const drawn = lines.flatMap(({ name, place, curve }) => {
    const colour = colourOf(place);
    const main = { label: name, stroke: colour, width: 1.5, spanGaps: true, points: { show: !isSmoothable(curve), size: 5 } };
    return smoothing && isSmoothable(curve) ? [{ ...main, stroke: `${colour}55`, width: 1 }, main] : [main];
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
    scales: {
      x: { time: false, range: (_, least, most) => (least === most ? [least - 1, most + 1] : [least, most]) },
      y: { distr: props.log ? 3 : 1, range: props.log ? undefined : spanOf },
    },
    axes: [
      { ...axis, size: 22, space: 60, grid: { show: false }, incrs: WHOLE, values: (_, marks) => ticks(marks) },
      { ...axis, size: 46, space: 32, values: (_, marks) => ticks(marks) },
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

  // A new plot when its shape changes; new numbers in the old one while the run continues, so that zoom and cursor stay.
  const shape = [
    theme,
    log,
    smoothing > 0,
    props.height,
    ...lines.map((line) => `${line.place}${line.name}${isSmoothable(line.curve)}`),
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

  const steps = plot.current?.data[0];
  let place = 0; // of the line that is read: the last one of its curve
  const readings = lines.map((line) => {
    const last = line.curve.values.findLast((value) => value !== null);
    place += smoothing && isSmoothable(line.curve) ? 2 : 1;
    const at = hover === null ? undefined : plot.current?.data[place]?.[hover];
    return { ...line, value: hover === null ? last : (at ?? null) };
  });
  return (
    <figure class={props.isNamed ? "chart named" : "chart"}>
      <figcaption>
        {props.onOpen ? (
          <button class="plain chart-title" title="Enlarge" onClick={props.onOpen}>
            {title}
          </button>
        ) : (
          <span class="chart-title">{title}</span>
        )}
        <span class="readout">
          {hover !== null && steps ? <span class="faint">step {number(steps[hover])}</span> : null}
          {readings.map((reading) => (
            <span key={reading.name} class={`value run-ink-${reading.place % 8}`}>
              {props.isNamed ? `${reading.name} ${number(reading.value, 3)}` : number(reading.value)}
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
