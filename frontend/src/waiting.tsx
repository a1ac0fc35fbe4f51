/** An asynchronous run: who waits for whom, how much is on its way, and how old the tokens are that are trained on. */
import { useMemo } from "preact/hooks";
import { useAnswer } from "./answer";
import { api } from "./api";
import { Chart, type Line } from "./chart";
import { number } from "./format";
import { Alerts } from "./run";
import { type Curve, live, look, type RunCurves, useStore } from "./store";

const PREFIX = "async/";
const WORKER = "async/worker_idle/";
const AGE = "async/token_age/share/";
const LOGS = 20; // whose mean is "now"
const MUCH = 0.05; // of the time: whoever waits less does not count as waiting
const IN_TURNS = 0.2; // of the time, by both
const KINDS = new Set(["rollouts_wait", "rollouts_at_the_bound", "few_samples_count", "old_tokens_masked"]); // of alerts

type Named = Record<string, Curve>;
type Waiter = { name: string; share: number };

export const isAsync = (run: RunCurves | undefined) => Object.keys(run?.curves ?? {}).some((name) => name.startsWith(PREFIX));

function recent(curve: Curve | undefined): number | null {
  const values = (curve?.values ?? []).filter((value) => value !== null).slice(-LOGS);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

const percent = (share: number) => `${Math.round(100 * share)} %`;
const under = (curves: Named, prefix: string) =>
  Object.keys(curves)
    .filter((name) => name.startsWith(prefix))
    .map((name) => name.slice(prefix.length))
    .sort((one, other) => one.localeCompare(other, "en", { numeric: true }));

const keyOf = (waiter: string) => (waiter === "trainer" ? "async/trainer_idle" : WORKER + waiter);

/** The trainer first. A worker that left is not among them: its curve ends before the others do. */
function waitersOf(curves: Named): Waiter[] {
  const last = curves["async/trainer_idle"]?.steps.at(-1);
  const workers = under(curves, WORKER).filter((name) => curves[WORKER + name].steps.at(-1) === last);
  return ["trainer", ...workers]
    .map((name) => ({ name, share: recent(curves[keyOf(name)]) }))
    .filter((each): each is Waiter => each.share !== null);
}

/** In words. */
function verdict([trainer, ...workers]: Waiter[]): string {
  if (!workers.length) return `The trainer waits for rollouts ${percent(trainer.share)} of its time.`;
  const idle = workers.reduce((sum, worker) => sum + worker.share, 0) / workers.length;
  const both = `The trainer waits ${percent(trainer.share)} of its time, the workers ${percent(idle)} of theirs`;
  if (Math.min(trainer.share, idle) >= IN_TURNS) return `Both take turns. ${both}: a larger lead lets them work at once.`;
  if (Math.max(trainer.share, idle) < MUCH) return `Nobody waits. ${both}.`;
  return `${trainer.share >= idle ? "The trainer waits for the workers" : "The workers wait for the trainer"}. ${both}.`;
}

const BAR = 320;

function Waiters({ waiters }: { waiters: Waiter[] }) {
  return (
    <table class="waiters">
      <tbody>
        {waiters.map(({ name, share }) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>
              <svg width={BAR} height="12" role="img" aria-label={`${name} works ${percent(1 - share)} of the time`}>
                <rect class="idle" width={BAR} height="12" rx="3" />
                <rect class="busy" width={BAR * (1 - share)} height="12" rx="3" />
              </svg>
            </td>
            <td class="num">works {percent(1 - share)}</td>
            <td class="num">waits {percent(share)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const COLUMN = 46;
const HEIGHT = 110;

function Ages({ curves }: { curves: Named }) {
  const ages = under(curves, AGE);
  if (!ages.length) return <p class="faint">This run has not written how old its tokens are.</p>;
  const shares = ages.map((age) => recent(curves[AGE + age]) ?? 0);
  const most = Math.max(...shares, 1e-9);
  const said = ages.map((age, i) => `${age}: ${percent(shares[i])}`).join(", ");
  return (
    <svg class="ages" width={ages.length * COLUMN} height={HEIGHT + 34} role="img" aria-label={`Shares of tokens by age: ${said}`}>
      {ages.map((age, i) => {
        const height = shares[i] ? Math.max(1.5, (HEIGHT * shares[i]) / most) : 0;
        const middle = i * COLUMN + COLUMN / 2;
        return (
          <g key={age}>
            <rect x={i * COLUMN + 4} y={HEIGHT + 16 - height} width={COLUMN - 8} height={height} rx="2" />
            <text x={middle} y={HEIGHT + 11 - height}>
              {percent(shares[i])}
            </text>
            <text class="age" x={middle} y={HEIGHT + 30}>
              {age}
            </text>
          </g>
        );
      })}
    </svg>
  );
}

const CHARTS: Record<string, Record<string, string>> = {
  Groups: { "in flight": "in_flight", "waiting for the trainer": "waiting" },
  "Age of trained tokens, in steps": { mean: "token_age/mean", p95: "token_age/p95", oldest: "token_age/max" },
  "Share of the bound used": { "": "bound_used" },
  "Lead, in steps": { "": "lead" },
  "Seconds of a group": { median: "group_seconds/p50", longest: "group_seconds/max" },
  "Share of tokens masked as too old": { "": "masked_share" },
};
const TOTALS = ["finished", "taken", "reissued", "late_results", "dropped/stale"];

function Charts({ curves, waiters }: { curves: Named; waiters: Waiter[] }) {
  const charts = useMemo(() => {
    const linesOf = (named: [string, string][]): Line[] =>
      named.flatMap(([name, key], place) => (curves[key] ? [{ name, place, curve: curves[key] }] : []));
    const own = Object.entries(CHARTS).map(([title, named]) => ({
      title,
      lines: linesOf(Object.entries(named).map(([name, key]) => [name, PREFIX + key])),
    }));
    const waiting = linesOf(waiters.map(({ name }) => [name, keyOf(name)]));
    return [{ title: "Share of the time spent waiting", lines: waiting }, ...own].filter(({ lines }) => lines.length);
  }, [curves]);
  return (
    <div class="charts">
      {charts.map(({ title, lines }) => (
        <Chart key={title} title={title} lines={lines} smoothing={0} log={false} height={150} isNamed />
      ))}
    </div>
  );
}

export function WaitingView() {
  const { run } = useStore(look);
  const { runs, curves: all } = useStore(live);
  const { found: info } = useAnswer(() => api.info(run), [run, runs.find((each) => each.id === run)?.alerts]);
  const curves = all[run]?.curves ?? {};
  if (!isAsync(all[run]))
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty">This run writes and trains in turns: nobody works beside anybody.</p>
      </main>
    );
  const waiters = waitersOf(curves);
  const totals = TOTALS.filter((name) => curves[PREFIX + name]).map(
    (name) => `${name.replace("_", " ").replace("/", ": ")} ${number(curves[PREFIX + name].values.at(-1))}`,
  );
  return (
    <main class="view waiting-view" id="main" tabIndex={-1}>
      <div class="beside">
        <section class="section">
          <h2 id="verdict">{waiters[0]?.name === "trainer" ? verdict(waiters) : "This run has not written who waits."}</h2>
          <p class="faint">Means of the last {LOGS} logs. A worker waits while it has no group to write.</p>
          <Waiters waiters={waiters} />
        </section>
        <section class="section">
          <h2>Trained tokens by age</h2>
          <p class="faint">Optimizer steps between the weights that wrote a token and the step that trains on it.</p>
          <Ages curves={curves} />
        </section>
      </div>
      <Charts curves={curves} waiters={waiters} />
      <section class="section">
        <h2>Groups so far</h2>
        <p>{totals.join(" · ")}</p>
      </section>
      <section class="section">
        <h2>Alerts about waiting and ages</h2>
        {info ? <Alerts alerts={info.alerts.filter((alert) => KINDS.has(alert.kind ?? ""))} /> : null}
      </section>
    </main>
  );
}
