/** What is known about a run beside its numbers: alerts, options, card, and the data that it was trained on. */
import { useState } from "preact/hooks";
import { useAnswer } from "./answer";
import { api } from "./api";
import { count, textOf } from "./format";
import { Spoken } from "./messages";
import { Content, type Pictures, picturesOfRow } from "./pictures";
import { live, look, useStore } from "./store";
import { Tokens } from "./tokens";
import type { DataRow, Info, Message } from "./types";

const RECORD = "run.json";

export function Alerts({ alerts, skipped = 0 }: { alerts: Info["alerts"]; skipped?: number }) {
  if (!alerts.length && !skipped) return <p class="faint">No alert so far.</p>;
  return (
    <ul class="alerts">
      {skipped ? (
        <li>{count(skipped, "step")} skipped because a number was not finite (skipped_steps.jsonl).</li>
      ) : null}
      {alerts.toReversed().map((alert, i) => (
        <li key={i}>
          <span class="faint">step {alert.step}</span> <b>{alert.seen}</b>
          {alert.meaning ? <div>Usually: {alert.meaning}.</div> : null}
          {alert.remedy ? <div>Try: {alert.remedy}.</div> : null}
        </li>
      ))}
    </ul>
  );
}

function Settings({ name, settings }: { name: string; settings: Record<string, unknown> }) {
  const [words, setWords] = useState("");
  const rows = Object.entries(settings).filter(([key]) => key.toLowerCase().includes(words.toLowerCase()));
  return (
    <details class="section" open={rows.length < 40 || words !== ""}>
      <summary>
        <h2>{name}</h2>
        <span class="faint">{count(Object.keys(settings).length, "value")}</span>
      </summary>
      <input
        type="search"
        placeholder="Find an option"
        aria-label={`Find in ${name}`}
        value={words}
        onInput={(e) => setWords(e.currentTarget.value)}
      />
      <table class="settings">
        <tbody>
          {rows.map(([key, value]) => (
            <tr key={key}>
              <th scope="row">{key}</th>
              <td>{value === null ? <span class="faint">none</span> : textOf(value as never) || JSON.stringify(value)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

interface Start {
  command?: string;
  time?: string;
  versions?: Record<string, string>;
}

/** run.json of `posttrain METHOD`: how the run was started, each time, and with which versions. */
function Starts({ record }: { record: Record<string, unknown> | undefined }) {
  const starts = record?.starts;
  if (!Array.isArray(starts) || !starts.length) return null;
  return (
    <section class="section">
      <h2>Started</h2>
      {(starts as Start[]).toReversed().map((start, i) => (
        <div key={i} class="data-row">
          <div class="faint">{start.time}</div>
          <pre>{start.command}</pre>
          <div class="faint">
            {Object.entries(start.versions ?? {})
              .map(([name, version]) => `${name} ${version}`)
              .join(", ")}
          </div>
        </div>
      ))}
    </section>
  );
}

function isMessages(value: unknown): value is Message[] {
  return Array.isArray(value) && value.length > 0 && value.every((each) => each && typeof each === "object" && "role" in each);
}

function OneRow({ row, pictures, onRead }: { row: DataRow; pictures: Pictures; onRead: (line: string) => void }) {
  return (
    <article class="data-row" aria-label={`Row ${row.row}`}>
      <div class="faint">row {row.row}</div>
      {row.samples?.map((sample, i) => (
        <div key={i}>
          <div class="faint">
            {count(sample.tokens, "token")}, {sample.trained_tokens} trained
          </div>
          <Tokens tokens={sample} colour="mask" label={`Tokens of row ${row.row}`} onRead={onRead} />
        </div>
      ))}
      {Object.entries(row.fields ?? {}).map(([name, value]) => (
        <div key={name} class="data-field">
          <div class="role">{name}</div>
          {isMessages(value) ? (
            <Spoken said={value} pictures={pictures} />
          ) : (
            <div class="said">
              <Content content={value} pictures={pictures} />
            </div>
          )}
        </div>
      ))}
    </article>
  );
}

function Data({ run, info }: { run: number; info: Info }) {
  const [source, setSource] = useState(0);
  const [start, setStart] = useState(0);
  const [line, setLine] = useState("");
  const { found: page, failure } = useAnswer(() => api.data(run, source, start), [source, start]);
  return (
    <>
      <div class="segments" role="radiogroup" aria-label="Source of data">
        {info.sources.map((each, i) => (
          <button
            key={i}
            role="radio"
            aria-checked={i === source}
            title={each.path ?? each.note}
            onClick={() => (setSource(i), setStart(0))}
          >
            {each.name}
          </button>
        ))}
      </div>
      <p class="faint">{[info.sources[source].path, info.sources[source].note].filter(Boolean).join(" · ")}</p>
      {failure ? <p class="notice bad">{failure}</p> : null}
      {page && !page.rows.length && !failure ? <p class="faint">Nothing to show from here.</p> : null}
      {page?.rows.map((row) => (
        <OneRow key={row.row} row={row} pictures={picturesOfRow(run, source, row.row)} onRead={setLine} />
      ))}
      {page && (page.more || page.start > 0) ? (
        <span class="pager">
          <button
            disabled={page.start === 0}
            onClick={() => setStart(Math.max(0, page.start - page.page_rows))}
            aria-label="Rows before"
          >
            ‹
          </button>
          {page.start + 1}–{page.start + page.rows.length}
          {page.total !== null ? ` of ${page.total.toLocaleString("en")}` : ""}
          <button disabled={!page.more} onClick={() => setStart(page.start + page.page_rows)} aria-label="Next rows">
            ›
          </button>
        </span>
      ) : null}
      {line ? (
        <div class="reading" role="status">
          {line}
        </div>
      ) : null}
    </>
  );
}

export function RunView() {
  const { run } = useStore(look);
  const { runs } = useStore(live);
  const state = runs.find((each) => each.id === run);
  const { found: info, failure } = useAnswer(() => api.info(run), [run, state?.alerts]);
  if (failure)
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty bad-ink">{failure}</p>
      </main>
    );
  if (!info) return <main class="view" id="main" tabIndex={-1} aria-busy="true" />;
  const settings = Object.entries(info.settings).filter(([name, values]) => name !== RECORD || !Array.isArray(values.starts));
  return (
    <main class="view run-view" id="main" tabIndex={-1}>
      <p class="faint path">{info.path}</p>
      <section class="section">
        <h2>Alerts</h2>
        <Alerts alerts={info.alerts} skipped={info.skipped_steps} />
      </section>
      <Starts record={info.settings[RECORD]} />
      {settings.map(([name, settings]) => (
        <Settings key={name} name={name} settings={settings} />
      ))}
      {info.options ? (
        <Settings name={`Options at checkpoint ${info.checkpoints.at(-1)}`} settings={info.options} />
      ) : (
        <p class="faint">Options are stored with checkpoints, and there is none yet.</p>
      )}
      {info.card ? (
        <details class="section">
          <summary>
            <h2>Model card</h2>
          </summary>
          <pre class="said">{info.card}</pre>
        </details>
      ) : null}
      <section class="section">
        <h2>Data</h2>
        {info.sources.length ? (
          <Data key={run} run={run} info={info} />
        ) : (
          <p class="faint">
            This run's folder does not say where its data is. <code>posttrain view RUN --data PATH</code> shows a dataset here.
          </p>
        )}
      </section>
    </main>
  );
}
