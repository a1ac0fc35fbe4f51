/** One prompt at every step that asked it: how its completions did, and what changed between two of them. */
import { useMemo, useState } from "preact/hooks";
import { useAnswer } from "./answer";
import { api } from "./api";
import { wordDiff } from "./diff";
import { count, fixed, number } from "./format";
import { useKeys } from "./keys";
import { plain, Spoken } from "./messages";
import { picturesOfRollouts } from "./pictures";
import { openGroup } from "./rollouts";
import { type Address, go } from "./store";
import type { PromptTime } from "./types";

const WIDTH = 720;
const HEIGHT = 120;

function RewardPlot({ times, shown, onPick }: { times: PromptTime[]; shown: number; onPick: (i: number) => void }) {
  const rewards = times.flatMap((time) => time.rewards).filter((value) => value !== null);
  if (!rewards.length) return null;
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  const [first, last] = [times[0].step, times.at(-1)!.step];
  const x = (step: number) => 44 + ((WIDTH - 56) * (step - first)) / Math.max(last - first, 1);
  const y = (value: number) => HEIGHT - 20 - ((HEIGHT - 32) * (value - least)) / Math.max(most - least, 1e-9);
  const means = times.filter((time) => time.mean !== null);
  const line = means.map((time, i) => `${i ? "L" : "M"}${x(time.step).toFixed(1)} ${y(time.mean!).toFixed(1)}`).join("");
  return (
    <svg
      class="reward-plot"
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      role="img"
      aria-label={`Rewards of this prompt from step ${first} to ${last}`}
    >
      {[least, most].map((value) => (
        <g key={value}>
          <line x1="44" x2={WIDTH - 12} y1={y(value)} y2={y(value)} class="rule" />
          <text x="38" y={y(value) + 4} text-anchor="end">
            {number(value, 3)}
          </text>
        </g>
      ))}
      <text x={x(first)} y={HEIGHT - 3} text-anchor="middle">
        {first}
      </text>
      <text x={x(last)} y={HEIGHT - 3} text-anchor="middle">
        {last}
      </text>
      {times.map((time, i) => (
        <g key={time.step} class={`dots${i === shown ? " active" : ""}`} onClick={() => onPick(i)}>
          <title>{`Step ${time.step}: mean ${number(time.mean)}`}</title>
          <rect x={x(time.step) - 6} y="0" width="12" height={HEIGHT} class="catch" />
          {time.rewards.map((value, j) => (value === null ? null : <circle key={j} cx={x(time.step)} cy={y(value)} r="2.4" />))}
        </g>
      ))}
      <path d={line} class="mean" />
    </svg>
  );
}

function Changes({ before, after }: { before: string; after: string }) {
  const pieces = useMemo(() => wordDiff(before, after), [before, after]);
  return (
    <div class="said diff">
      {pieces.map((piece, i) =>
        piece.kind === "same" ? (
          <span key={i}>{piece.text}</span>
        ) : piece.kind === "new" ? (
          <ins key={i}>{piece.text}</ins>
        ) : (
          <del key={i}>{piece.text}</del>
        ),
      )}
    </div>
  );
}

export function PromptView({ address }: { address: Address }) {
  const run = Number(address.words.get("run"));
  const prompt = address.words.get("prompt") ?? "";
  const [shown, setShown] = useState(0);
  const [base, setBase] = useState(0);
  const [isDiff, setDiff] = useState(true);
  const { found, failure } = useAnswer(
    () => api.prompt(run, prompt),
    [run, prompt],
    (history) => {
      setShown(history.times.length - 1);
      setBase(0);
    },
  );
  const times = found?.times ?? [];
  const move = (by: number) => setShown(Math.max(0, Math.min(times.length - 1, shown + by)));
  useKeys({
    Escape: () => history.back(),
    j: () => move(1),
    ArrowDown: () => move(1),
    k: () => move(-1),
    ArrowUp: () => move(-1),
    d: () => setDiff(!isDiff),
    m: () => setBase(shown),
    Enter: () => times[shown] && openGroup(run, times[shown]),
  });
  if (failure)
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty bad-ink">{failure}</p>
      </main>
    );
  if (!found) return <main class="view" id="main" tabIndex={-1} aria-busy="true" />;
  const [one, other] = [times[base], times[shown]];
  return (
    <main class="view prompt-view" id="main" tabIndex={-1}>
      <div class="toolbar">
        <button onClick={() => go("rollouts")}>‹ Rollouts</button>
        <h2>
          One prompt <span class="faint">at {count(times.length, "step")}</span>
        </h2>
        <span class="grow" />
        <label class="field">
          <input type="checkbox" checked={isDiff} onChange={() => setDiff(!isDiff)} /> Mark what changed
        </label>
      </div>
      <section class="prompt-box" aria-label="Prompt">
        <Spoken said={found.prompt_said} pictures={picturesOfRollouts(run)} />
      </section>
      <RewardPlot times={times} shown={shown} onPick={setShown} />
      <div class="history">
        <div class="table-box">
          <table aria-label="Steps" class="steps">
            <thead>
              <tr>
                <th class="num">step</th>
                <th class="num">mean</th>
                <th class="num">best</th>
                <th class="num">worst</th>
                <th class="num">tokens</th>
                <th>
                  <span class="hidden">Compare with</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {times.map((time, i) => (
                <tr
                  key={`${time.step}/${time.group}`}
                  class={i === shown ? "active" : ""}
                  onClick={() => setShown(i)}
                  data-step={time.step}
                >
                  <td class="num">{time.step}</td>
                  <td class="num">
                    <b>{fixed(time.mean, 2)}</b>
                  </td>
                  <td class="num">{fixed(time.best.reward, 2)}</td>
                  <td class="num">{fixed(time.worst.reward, 2)}</td>
                  <td class="num">{number(time.tokens, 3)}</td>
                  <td>
                    {i === base ? (
                      <span class="faint">compared</span>
                    ) : (
                      <button
                        class="plain link quiet"
                        onClick={(e) => {
                          e.stopPropagation();
                          setBase(i);
                        }}
                      >
                        compare
                      </button>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {[one, other].map((time, place) => (
          <article key={place} class="completion" aria-label={`Best completion at step ${time.step}`}>
            <header>
              <h3>Step {time.step}</h3>
              <span class="faint">best of {time.completions}</span>
              <span class="grow" />
              <b class="score">{fixed(time.best.reward, 2)}</b>
              <button onClick={() => openGroup(run, time)}>Open group</button>
            </header>
            {isDiff && place === 1 && base !== shown ? (
              <Changes before={plain(one.best.completion_said)} after={plain(other.best.completion_said)} />
            ) : (
              <Spoken said={time.best.completion_said} pictures={picturesOfRollouts(run)} />
            )}
          </article>
        ))}
      </div>
    </main>
  );
}
