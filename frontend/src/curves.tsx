/** All metrics of all runs, in sections by the first part of their names. */
import { useMemo, useRef, useState } from "preact/hooks";
import { Chart, isSmoothable, type Line } from "./chart";
import { unfocus, useDialogKeys, useKeys } from "./keys";
import { live, useStore } from "./store";

const MAIN = [
  "reward",
  "loss",
  "reward_std",
  "entropy",
  "kl",
  "mean_token_accuracy",
  "accuracy",
  "margin",
  "grad_norm",
  "learning_rate",
];
function sectionOf(name: string): string {
  if (name.startsWith("eval_")) return "eval";
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
}

function inOrder(names: string[]): string[] {
  const place = (name: string) => (MAIN.indexOf(name) + 1 || MAIN.length + 1) + (name.includes("/") ? 100 : 0);
  return [...names].sort((one, other) => place(one) - place(other) || one.localeCompare(other));
}

function SmoothingSlider({ value, onChange, isOff }: { value: number; onChange: (value: number) => void; isOff: boolean }) {
  return (
    <label class="field" title={isOff ? "Curves of fewer than 20 points are drawn as they are." : undefined}>
      Smoothing
      <input
        type="range"
        min="0"
        max="0.98"
        step="0.02"
        value={value}
        disabled={isOff}
        onInput={(e) => onChange(Number(e.currentTarget.value))}
      />
      <output>{value && !isOff ? value.toFixed(2) : "off"}</output>
    </label>
  );
}

export function Curves() {
  const { runs, curves, hidden } = useStore(live);
  const [smoothing, setSmoothing] = useState(0.6);
  const [log, setLog] = useState(false);
  const [words, setWords] = useState("");
  const [large, setLarge] = useState<string | null>(null);
  const search = useRef<HTMLInputElement>(null);
  useKeys({
    "/": () => search.current?.focus(),
    l: () => setLog(!log),
    Escape: unfocus,
  });
  useDialogKeys(() => setLarge(null), large !== null);

  const shown = runs.filter((run) => !hidden.has(run.id));
  const sections = useMemo(() => {
    const names = new Set(shown.flatMap((run) => Object.keys(curves[run.id]?.curves ?? {})));
    const found = inOrder([...names]).filter((name) => name.toLowerCase().includes(words.toLowerCase()));
    const bySection = new Map<string, string[]>();
    for (const name of found) bySection.set(sectionOf(name), [...(bySection.get(sectionOf(name)) ?? []), name]);
    return [...bySection].sort(([one], [other]) => (one === "" ? -1 : other === "" ? 1 : one.localeCompare(other)));
  }, [curves, words, hidden]);
  const hasSmoothable = shown.some((run) => Object.values(curves[run.id]?.curves ?? {}).some(isSmoothable));
  const linesOf = (name: string): Line[] =>
    shown
      .filter((run) => curves[run.id]?.curves[name])
      .map((run) => ({ name: run.name, place: run.id, curve: curves[run.id].curves[name] }));

  return (
    <main class="view" id="main" tabIndex={-1}>
      <div class="toolbar" role="toolbar" aria-label="Curves">
        <input
          ref={search}
          type="search"
          placeholder="Find a metric  /"
          aria-label="Find a metric"
          value={words}
          onInput={(e) => setWords(e.currentTarget.value)}
        />
        <SmoothingSlider value={smoothing} onChange={setSmoothing} isOff={!hasSmoothable} />
        <label class="field">
          <input type="checkbox" checked={log} onChange={() => setLog(!log)} /> Log scale
        </label>
        <span class="faint grow hint">Drag over a chart to zoom, double-click to see all.</span>
      </div>
      {sections.length === 0 ? (
        <p class="empty">
          {words ? "No metric has such a name." : "Nothing has been logged yet. This page follows the run: leave it open."}
        </p>
      ) : null}
      {sections.map(([section, names]) => (
        <details class="section" open key={section}>
          <summary>
            <h2>{section || "Main"}</h2>
            <span class="faint">{names.length}</span>
          </summary>
          <div class="charts">
            {names.map((name) => (
              <Chart
                key={name}
                title={section && section !== "eval" ? name.slice(section.length + 1) : name}
                lines={linesOf(name)}
                smoothing={smoothing}
                log={log}
                height={150}
                onOpen={() => setLarge(name)}
              />
            ))}
          </div>
        </details>
      ))}
      {large ? (
        <div class="overlay" onClick={(e) => e.target === e.currentTarget && setLarge(null)}>
          <div class="dialog wide" role="dialog" aria-modal="true" aria-label={large}>
            <button class="close" autofocus onClick={() => setLarge(null)} aria-label="Close">
              ×
            </button>
            <Chart
              title={large}
              lines={linesOf(large)}
              smoothing={smoothing}
              log={log}
              height={Math.min(520, innerHeight - 180)}
            />
          </div>
        </div>
      ) : null}
    </main>
  );
}
