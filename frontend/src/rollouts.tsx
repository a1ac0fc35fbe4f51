/** The table of rollouts: found by text, limits and flags, sorted by a column, opened by a row. */
import { useEffect, useRef, useState } from "preact/hooks";
import { api, Failure } from "./api";
import { count, fixed, FLAG_NAMES, isByOther, number } from "./format";
import { unfocus, useKeys } from "./keys";
import { EMPTY, type Filter, filterWords, go, live, look, toggleChosen, useStore } from "./store";
import type { RolloutPage, Row, RunState } from "./types";

const PAGE = 100;
const TYPING_MS = 180;

/** The page of rollouts that the filter asks for; asked again when the run has written more. */
function useRollouts(run: number, filter: Filter): { page: RolloutPage | null; failure: string | null; isBusy: boolean } {
  const { runs } = useStore(live);
  const [page, setPage] = useState<RolloutPage | null>(null);
  const [failure, setFailure] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  const state = runs.find((each) => each.id === run);
  const version = filter.sort.includes("mismatch") ? state?.rollouts_version : state?.rollouts;
  const words = JSON.stringify({ ...filterWords(filter), start: filter.start, count: PAGE });
  const asked = useRef("");
  useEffect(() => {
    let isOld = false;
    const wait = asked.current && asked.current !== words ? TYPING_MS : 0;
    asked.current = words;
    const timer = setTimeout(() => {
      setBusy(true);
      api
        .rollouts(run, JSON.parse(words))
        .then((found) => !isOld && (setPage(found), setFailure(null)))
        .catch((error: Failure) => !isOld && setFailure(error.message))
        .finally(() => !isOld && setBusy(false));
    }, wait);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [run, words, version]);
  return { page, failure, isBusy };
}

function setFilter(change: Partial<Filter>): void {
  look.set({ filter: { ...look.get().filter, start: 0, ...change }, active: 0 });
}

function Limits({ name, label, extent }: { name: "reward" | "step"; label: string; extent?: [number | null, number | null] }) {
  const { filter } = useStore(look);
  const field = (end: "min" | "max", place: 0 | 1) => (
    <input
      class="short"
      inputMode="decimal"
      aria-label={`${label} ${end === "min" ? "from" : "to"}`}
      placeholder={number(extent?.[place], 3)}
      value={filter[`${name}_${end}`]}
      onInput={(e) =>
        /^-?\d*\.?\d*(e-?\d*)?$/.test(e.currentTarget.value) && setFilter({ [`${name}_${end}`]: e.currentTarget.value })
      }
    />
  );
  return (
    <span class="field">
      {label} {field("min", 0)} <span class="faint">to</span> {field("max", 1)}
    </span>
  );
}

function Histogram({ page }: { page: RolloutPage }) {
  const found = page.histogram;
  if (!found) return null;
  const most = Math.max(...found.counts);
  const bar = 5;
  return (
    <svg
      class="histogram"
      width={found.counts.length * bar}
      height="26"
      role="img"
      aria-label={`Rewards from ${number(found.edges[0])} to ${number(found.edges.at(-1))}`}
    >
      {found.counts.map((size, i) => {
        const height = size ? Math.max(1.5, (24 * size) / most) : 0;
        return (
          <g
            key={i}
            class="bin"
            onClick={() => setFilter({ reward_min: String(found.edges[i]), reward_max: String(found.edges[i + 1]) })}
          >
            <title>{`${number(found.edges[i])} to ${number(found.edges[i + 1])}: ${count(size, "rollout")}`}</title>
            <rect class="bin-space" x={i * bar} y="0" width={bar} height="26" />
            <rect x={i * bar} y={25 - height} width={bar - 1} height={height} rx="0.5" />
          </g>
        );
      })}
    </svg>
  );
}

function Filters({ page, searchRef }: { page: RolloutPage | null; searchRef: { current: HTMLInputElement | null } }) {
  const { filter } = useStore(look);
  const toggle = (flag: string) =>
    setFilter({ flags: filter.flags.includes(flag) ? filter.flags.filter((f) => f !== flag) : [...filter.flags, flag] });
  return (
    <div class="toolbar" role="search">
      <input
        ref={searchRef}
        id="search"
        type="search"
        placeholder="Search prompts and completions  /"
        aria-label="Search prompts and completions"
        value={filter.q}
        onInput={(e) => setFilter({ q: e.currentTarget.value })}
      />
      <Limits name="step" label="Step" extent={page?.extents.step} />
      <Limits name="reward" label="Reward" extent={page?.extents.reward} />
      {page ? <Histogram page={page} /> : null}
      <span class="chips" role="group" aria-label="Only rollouts with">
        {(page?.flags ?? []).map((flag) => (
          <button key={flag} class="chip" aria-pressed={filter.flags.includes(flag)} onClick={() => toggle(flag)}>
            {FLAG_NAMES[flag] ?? flag}
          </button>
        ))}
      </span>
    </div>
  );
}

function ClearFilter() {
  const { filter } = useStore(look);
  if (JSON.stringify({ ...filter, start: 0, sort: "" }) === JSON.stringify({ ...EMPTY, sort: "" })) return null;
  return (
    <button class="plain link" onClick={() => setFilter({ ...EMPTY, sort: filter.sort })}>
      Clear the filter
    </button>
  );
}

interface Column {
  key: string;
  label: string;
  title: string;
  sort?: string;
  cell: (row: Row) => preact.ComponentChildren;
  isText?: boolean;
}

function Signs({ row }: { row: Row }) {
  return (
    <span class="signs">
      {row.error ? <span class="sign bad">error</span> : null}
      {row.failures ? <span class="sign bad">reward failed</span> : null}
      {row.tool_errors ? (
        <span class="sign warn">tool error</span>
      ) : row.tool_calls ? (
        <span class="sign">{count(row.tool_calls, "call")}</span>
      ) : null}
      {isByOther(row.author) ? <span class="sign">{row.author}</span> : null}
      {row.truncated ? <span class="sign warn">cut</span> : null}
      {row.masked ? <span class="sign">masked</span> : null}
      {!row.error && !row.truncated ? <span class="faint">{row.finish}</span> : null}
    </span>
  );
}

function columnsOf(page: RolloutPage): Column[] {
  const numbers: Column[] = [
    { key: "step", label: "step", title: "Optimizer step", sort: "step", cell: (row) => row.step },
    { key: "group", label: "group", title: "Number of the prompt in the run", sort: "group", cell: (row) => row.group },
    { key: "sample", label: "#", title: "Which of the completions of its prompt", sort: "sample", cell: (row) => row.sample },
    {
      key: "reward",
      label: "reward",
      title: "Weighted sum of the rewards",
      sort: "reward",
      cell: (row) => <b>{fixed(row.reward, 2)}</b>,
    },
  ];
  const several = page.rewards.length > 1 ? page.rewards : [];
  const parts: Column[] = several.slice(0, 6).map((name) => ({
    key: `r:${name}`,
    label: name,
    title: `Reward ${name}`,
    sort: `reward:${name}`,
    cell: (row) => fixed(row.rewards[name], 2),
  }));
  return [
    ...numbers,
    ...parts,
    {
      key: "advantage",
      label: "adv.",
      title: "Advantage",
      sort: "advantage",
      cell: (row) => (
        <span class={(row.advantage ?? 0) > 0 ? "good-ink" : (row.advantage ?? 0) < 0 ? "bad-ink" : "faint"}>
          {fixed(row.advantage, 2)}
        </span>
      ),
    },
    { key: "tokens", label: "tokens", title: "Tokens of the completion", sort: "tokens", cell: (row) => row.tokens },
    {
      key: "mismatch",
      label: "mismatch",
      title: "Mean |sampling log-prob − trainer log-prob|",
      sort: "mismatch",
      cell: (row) => fixed(row.mismatch, 4),
    },
    { key: "end", label: "end", title: "How it ended, and what was odd", cell: (row) => <Signs row={row} />, isText: true },
    { key: "prompt", label: "prompt", title: "End of the prompt", cell: (row) => row.prompt_text, isText: true },
    {
      key: "completion",
      label: "completion",
      title: "Start of the completion",
      cell: (row) => row.completion_text,
      isText: true,
    },
  ];
}

function Head({ column }: { column: Column }) {
  const { filter } = useStore(look);
  const name = filter.sort.replace(/^-/, "");
  const isSorted = column.sort !== undefined && name === column.sort;
  const isFalling = filter.sort.startsWith("-");
  const className = column.isText ? "text" : "num";
  if (!column.sort)
    return (
      <th scope="col" class={className} title={column.title}>
        {column.label}
      </th>
    );
  const next = isSorted && isFalling ? column.sort : `-${column.sort}`;
  return (
    <th scope="col" class={className} aria-sort={isSorted ? (isFalling ? "descending" : "ascending") : "none"}>
      <button class="plain" title={`${column.title}. Sort`} data-sort={column.sort} onClick={() => setFilter({ sort: next })}>
        {column.label}
        <span class="arrow">{isSorted ? (isFalling ? "↓" : "↑") : ""}</span>
      </button>
    </th>
  );
}

/** Opens a group, at one of its completions if the place says which. */
export function openGroup(run: number, place: { step: number; group: number; sample?: number }): void {
  go("group", { run, step: place.step, group: place.group, ...(place.sample === undefined ? {} : { sample: place.sample }) });
}

function CountLine({ page, failure, state }: { page: RolloutPage | null; failure: string | null; state?: RunState }) {
  const unreadable = Object.entries(state?.unreadable ?? {});
  const isReading = state !== undefined && state.indexed < state.files;
  const isComparing = state !== undefined && !isReading && state.compared < state.files;
  return (
    <div class="count-line" role="status" aria-live="polite">
      {failure ? <span class="bad-ink">{failure}</span> : null}
      {page ? (
        <span>
          <b id="total">{page.total.toLocaleString("en")}</b> of {count(page.all, "rollout")}
        </span>
      ) : null}
      <ClearFilter />
      {isReading ? (
        <span class="faint">
          reading {state.indexed} of {count(state.files, "file")}…
        </span>
      ) : null}
      {isComparing ? <span class="faint">comparing log-probs, {Math.round((100 * state.compared) / state.files)} %</span> : null}
      {unreadable.length ? (
        <span class="warn-ink" title={unreadable.map((pair) => pair.join(": ")).join("\n")}>
          {count(unreadable.length, "file")} could not be read
        </span>
      ) : null}
      <span class="grow" />
      {page && page.total > PAGE ? <Pager page={page} /> : null}
    </div>
  );
}

function turn(page: RolloutPage | null, by: number): void {
  const start = look.get().filter.start + by * PAGE;
  if (page && start >= 0 && start < page.total) setFilter({ start });
}

function Pager({ page }: { page: RolloutPage }) {
  const { filter } = useStore(look);
  const last = Math.min(page.total, filter.start + PAGE);
  return (
    <span class="pager">
      <button onClick={() => turn(page, -1)} disabled={filter.start === 0} aria-label="Page before">
        ‹
      </button>
      {filter.start + 1}–{last}
      <button onClick={() => turn(page, 1)} disabled={last >= page.total} aria-label="Next page">
        ›
      </button>
    </span>
  );
}

function RolloutTable({ page }: { page: RolloutPage }) {
  const { run, active, chosen } = useStore(look);
  const body = useRef<HTMLTableSectionElement>(null);
  const columns = columnsOf(page);
  useEffect(() => {
    body.current?.children[active]?.scrollIntoView({ block: "nearest" });
  }, [active]);
  const open = (row: Row, i: number) => {
    look.set({ active: i });
    openGroup(run, row);
  };
  return (
    <table class="rollouts" aria-label="Rollouts" aria-rowcount={page.total}>
      <thead>
        <tr>
          <th scope="col" class="tick">
            <span class="hidden">Chosen</span>
          </th>
          {columns.map((column) => (
            <Head key={column.key} column={column} />
          ))}
        </tr>
      </thead>
      <tbody ref={body}>
        {page.rows.map((row, i) => (
          <tr
            key={row.id}
            data-id={row.id}
            class={`${i === active ? "active" : ""}${chosen.has(row.id) ? " chosen" : ""}`}
            aria-selected={chosen.has(row.id)}
            onClick={() => open(row, i)}
          >
            <td class="tick" onClick={(e) => e.stopPropagation()}>
              <input
                type="checkbox"
                aria-label={`Choose rollout ${row.id}`}
                checked={chosen.has(row.id)}
                onChange={() => toggleChosen(row.id)}
              />
            </td>
            {columns.map((column) => (
              <td key={column.key} class={column.isText ? `text col-${column.key}` : "num"}>
                {column.cell(row)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function Rollouts() {
  const { run, filter, active } = useStore(look);
  const { runs } = useStore(live);
  const { page, failure, isBusy } = useRollouts(run, filter);
  const search = useRef<HTMLInputElement>(null);
  const rows = page?.rows ?? [];
  const state = runs.find((each) => each.id === run);
  const move = (by: number) => {
    unfocus();
    look.set({ active: Math.max(0, Math.min(rows.length - 1, active + by)) });
  };
  useKeys({
    j: () => move(1),
    ArrowDown: () => move(1),
    k: () => move(-1),
    ArrowUp: () => move(-1),
    Enter: () => rows[active] && openGroup(run, rows[active]),
    x: () => rows[active] && toggleChosen(rows[active].id),
    p: () => rows[active] && go("prompt", { run, prompt: rows[active].prompt }),
    n: () => turn(page, 1),
    b: () => turn(page, -1),
    "/": () => search.current?.focus(),
    Escape: unfocus,
  });
  if (state && state.rollouts === 0 && state.files === 0) {
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty">
          This run has kept no rollouts. Online methods such as GRPO and RLOO keep them as long as <code>keep_rollouts</code> is
          on; what other methods were trained on is under Run.
        </p>
      </main>
    );
  }
  return (
    <main class="view table-view" id="main" tabIndex={-1}>
      <Filters page={page} searchRef={search} />
      <CountLine page={page} failure={failure} state={state} />
      <div class={`table-box${isBusy ? " busy" : ""}`}>
        {page ? <RolloutTable page={page} /> : null}
        {page && !rows.length ? <p class="empty">No rollout is like that.</p> : null}
      </div>
    </main>
  );
}
