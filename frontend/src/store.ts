/** State that several views share: plain objects with listeners. */
import { useLayoutEffect, useState } from "preact/hooks";
import { api, Failure } from "./api";
import type { RunState } from "./types";

export class Store<T extends object> {
  private listeners = new Set<() => void>();
  constructor(private value: T) {}
  get(): T {
    return this.value;
  }
  set(change: Partial<T>): void {
    this.value = { ...this.value, ...change };
    for (const listener of [...this.listeners]) listener();
  }
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** Subscribed before the browser paints: a change between the two would never be drawn. */
export function useStore<T extends object>(store: Store<T>): T {
  const [, redraw] = useState(0);
  useLayoutEffect(() => store.subscribe(() => redraw((n) => n + 1)), [store]);
  return store.get();
}

// ---- the runs, and the numbers of their curves ------------------------------------------------------------------------

export type Curve = { steps: number[]; values: (number | null)[] };
export interface RunCurves {
  generation: number;
  lines: number;
  curves: Record<string, Curve>;
}

export const live = new Store({
  runs: [] as RunState[],
  version: "",
  failure: null as Failure | null,
  curves: {} as Record<number, RunCurves>,
  hidden: new Set<number>(), // runs that are not drawn
});

const POLL_MS = 2000;
const FAILED_POLL_MS = 5000;
const READING_POLL_MS = 300; // until everything that is there has been read

async function readCurves(run: RunState): Promise<boolean> {
  const known = live.get().curves[run.id] ?? { generation: 0, lines: 0, curves: {} };
  if (known.lines === run.lines && known.generation === run.generation) return false;
  const news = await api.metrics(run.id, known.lines, known.generation);
  const curves = news.since === 0 ? {} : { ...known.curves };
  for (const [name, [steps, values]] of Object.entries(news.series)) {
    const before = curves[name];
    curves[name] = before ? { steps: before.steps.concat(steps), values: before.values.concat(values) } : { steps, values };
  }
  live.get().curves[run.id] = { generation: news.generation, lines: news.lines, curves };
  return true;
}

export async function poll(): Promise<void> {
  try {
    const { runs, version } = await api.runs();
    const changed = await Promise.all(runs.map(readCurves));
    const before = live.get();
    const isSame = JSON.stringify(before.runs) === JSON.stringify(runs) && before.failure === null;
    if (!isSame || changed.some(Boolean)) live.set({ runs, version, failure: null, curves: { ...before.curves } });
  } catch (error) {
    live.set({ failure: error instanceof Failure ? error : new Failure(String(error), 0) });
  }
  const { failure, runs } = live.get();
  const isReading = runs.some((run) => run.indexed < run.files);
  const wait = failure ? FAILED_POLL_MS : isReading ? READING_POLL_MS : document.hidden ? 4 * POLL_MS : POLL_MS;
  if (failure?.status !== 401) setTimeout(poll, wait);
}

// ---- which rollouts are looked at, and which are chosen ----------------------------------------------------------------

export interface Filter {
  q: string;
  step_min: string;
  step_max: string;
  reward_min: string;
  reward_max: string;
  flags: string[];
  sort: string;
  start: number;
}
export const EMPTY: Filter = {
  q: "",
  step_min: "",
  step_max: "",
  reward_min: "",
  reward_max: "",
  flags: [],
  sort: "-step",
  start: 0,
};

export const look = new Store({
  run: 0,
  filter: { ...EMPTY },
  active: 0, // row of the table
  chosen: new Set<string>(),
  colour: "logp" as Colour,
});

export type Colour = "logp" | "advantage" | "mask" | "mismatch" | "none";

export function filterWords(filter: Filter): Record<string, string> {
  const { q, step_min, step_max, reward_min, reward_max, flags, sort } = filter;
  return { q, step_min, step_max, reward_min, reward_max, flags: flags.join(","), sort };
}

export function toggleChosen(id: string): void {
  const chosen = new Set(look.get().chosen);
  if (!chosen.delete(id)) chosen.add(id);
  look.set({ chosen });
}

// ---- the address -------------------------------------------------------------------------------------------------------

export interface Address {
  view: string;
  words: URLSearchParams;
}
export function readAddress(): Address {
  const [view, words] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "", words: new URLSearchParams(words ?? "") };
}
export function go(view: string, words: Record<string, string | number> = {}): void {
  const query = new URLSearchParams(Object.entries(words).map(([name, value]) => [name, String(value)])).toString();
  location.hash = `#/${view}${query ? `?${query}` : ""}`;
}
export function useAddress(): Address {
  const [address, setAddress] = useState(readAddress);
  useLayoutEffect(() => {
    const listener = () => setAddress(readAddress());
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return address;
}
