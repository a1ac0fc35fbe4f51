/** The frame: runs, views, keys that work everywhere. */
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Curves } from "./curves";
import { GroupView } from "./group";
import { Help } from "./help";
import { useKeys } from "./keys";
import { PromptView } from "./prompt";
import { Rollouts } from "./rollouts";
import { RunView } from "./run";
import { Selection } from "./selection";
import { type Address, go, live, look, poll, useAddress, useStore } from "./store";
import { toggleTheme, useTheme } from "./theme";
import { isAsync, WaitingView } from "./waiting";
import "./app.css";

type View = (props: { address: Address }) => preact.ComponentChild;
const VIEWS: Record<string, View> = {
  curves: () => <Curves />,
  rollouts: () => <Rollouts />,
  group: ({ address }) => <GroupView address={address} />,
  prompt: ({ address }) => <PromptView address={address} />,
  run: () => <RunView />,
  waiting: () => <WaitingView />,
};
const TABS: [string, string][] = [
  ["curves", "Curves"],
  ["rollouts", "Rollouts"],
  ["run", "Run"],
  ["waiting", "Waiting"],
];
const OF_ROLLOUTS = new Set(["rollouts", "group", "prompt"]);

function RunChips() {
  const { runs, hidden } = useStore(live);
  const toggle = (id: number) => {
    const next = new Set(hidden);
    if (!next.delete(id)) next.add(id);
    live.set({ hidden: next });
  };
  return (
    <span class="runs" role="group" aria-label="Runs that are drawn">
      {runs.map((run) => (
        <button key={run.id} class="chip run" aria-pressed={!hidden.has(run.id)} title={run.path} onClick={() => toggle(run.id)}>
          <i class={`dot run-ink-${run.id % 8}`} /> {run.name}
        </button>
      ))}
    </span>
  );
}

function RunChoice() {
  const { runs } = useStore(live);
  const { run } = useStore(look);
  if (runs.length < 2) return <span class="runs">{runs[0]?.name}</span>;
  const choose = (id: number) => {
    look.set({ run: id, chosen: new Set(), active: 0 });
    if (OF_ROLLOUTS.has(location.hash.replace(/^#\/(\w*).*/, "$1"))) go("rollouts");
  };
  return (
    <select aria-label="Run" value={run} onChange={(e) => choose(Number(e.currentTarget.value))}>
      {runs.map((each) => (
        <option key={each.id} value={each.id}>
          {each.name}
        </option>
      ))}
    </select>
  );
}

function Head({ view, onHelp }: { view: string; onHelp: () => void }) {
  const { runs, hidden, curves } = useStore(live);
  const { run: chosen } = useStore(look);
  const theme = useTheme();
  const tab = OF_ROLLOUTS.has(view) ? "rollouts" : view;
  const shown = runs.filter((run) => (tab === "curves" ? !hidden.has(run.id) : run.id === chosen));
  const step = Math.max(...shown.map((run) => run.step ?? 0), 0);
  const alerts = runs.reduce((sum, run) => sum + run.alerts, 0);
  return (
    <header class="head">
      <a
        class="skip"
        href="#main"
        onClick={(e) => {
          e.preventDefault();
          document.querySelector<HTMLElement>("#main")?.focus();
        }}
      >
        Skip to the content
      </a>
      <span class="name">posttrain</span>
      <nav aria-label="Views">
        {TABS.filter(([name]) => name !== "waiting" || Object.values(curves).some(isAsync)).map(([name, label], i) => (
          <a key={name} href={`#/${name}`} aria-current={tab === name ? "page" : undefined} title={`${i + 1}`}>
            {label}
            {name === "run" && alerts ? (
              <span class="badge" title={`${alerts} alerts`}>
                {alerts}
              </span>
            ) : null}
          </a>
        ))}
      </nav>
      {tab === "curves" ? <RunChips /> : <RunChoice />}
      <span class="grow" />
      <span class="faint" id="step">
        step {step.toLocaleString("en")}
      </span>
      <button
        class="plain icon"
        aria-label={theme === "dark" ? "Light colours" : "Dark colours"}
        title="Light or dark  t"
        onClick={toggleTheme}
      >
        {theme === "dark" ? "☀" : "☾"}
      </button>
      <button class="plain icon" aria-label="Keys" title="Keys  ?" onClick={onHelp}>
        ?
      </button>
    </header>
  );
}

function App() {
  const address = useAddress();
  const { runs, failure } = useStore(live);
  const [isHelp, setHelp] = useState(false);
  useKeys({
    "1": () => go("curves"),
    "2": () => go("rollouts"),
    "3": () => go("run"),
    "4": () => Object.values(live.get().curves).some(isAsync) && go("waiting"),
    t: toggleTheme,
    "?": () => setHelp(true),
  });
  const fallback = runs.every((run) => run.lines === 0) && runs.some((run) => run.rollouts) ? "rollouts" : "curves";
  const name = address.view in VIEWS ? address.view : fallback;
  useEffect(() => {
    const run = address.words.get("run");
    if (run !== null && Number(run) !== look.get().run) look.set({ run: Number(run), chosen: new Set() });
    scrollTo(0, 0);
  }, [address]);
  useEffect(() => {
    document.title = runs.length ? `${runs.map((run) => run.name).join(", ")} · posttrain` : "posttrain view";
  }, [runs.length]);
  if (failure?.status === 401) {
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty">{failure.message}</p>
      </main>
    );
  }
  const Shown = VIEWS[name];
  return (
    <>
      <Head view={name} onHelp={() => setHelp(true)} />
      {failure ? (
        <p class="banner" role="alert">
          {failure.message}
        </p>
      ) : null}
      {runs.length ? <Shown address={address} /> : <main class="view" id="main" tabIndex={-1} aria-busy="true" />}
      {OF_ROLLOUTS.has(name) ? <Selection /> : null}
      {isHelp ? <Help onClose={() => setHelp(false)} /> : null}
    </>
  );
}

render(<App />, document.getElementById("app")!);
poll();
