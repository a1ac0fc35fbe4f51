/** The completions of one prompt at one step, side by side. */
import { useEffect, useRef, useState } from "preact/hooks";
import { useAnswer } from "./answer";
import { api } from "./api";
import { count, fixed, isByOther, number } from "./format";
import { useKeys } from "./keys";
import { Calls, Spoken } from "./messages";
import { picturesOfRollouts } from "./pictures";
import { openGroup } from "./rollouts";
import { type Address, type Colour, go, look, toggleChosen, useStore } from "./store";
import { COLOUR_NAMES, Legend, Tokens } from "./tokens";
import type { Detail, Group } from "./types";

const COLOURS = Object.keys(COLOUR_NAMES) as Colour[];

export function ColourChoice() {
  const { colour } = useStore(look);
  return (
    <div class="segments" role="radiogroup" aria-label="Colour of tokens">
      {COLOURS.map((name) => (
        <button
          key={name}
          role="radio"
          aria-checked={colour === name}
          data-colour={name}
          onClick={() => look.set({ colour: name })}
        >
          {COLOUR_NAMES[name]}
        </button>
      ))}
    </div>
  );
}

function Facts({ rollout }: { rollout: Detail }) {
  const rewards = Object.entries(rollout.rewards).filter(
    ([, value]) => value !== null || Object.keys(rollout.rewards).length > 1,
  );
  return (
    <dl class="facts">
      {rewards.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{fixed(value, 3)}</dd>
        </div>
      ))}
      <div>
        <dt>advantage</dt>
        <dd class={(rollout.advantage ?? 0) > 0 ? "good-ink" : (rollout.advantage ?? 0) < 0 ? "bad-ink" : ""}>
          {fixed(rollout.advantage, 3)}
        </dd>
      </div>
      <div>
        <dt>tokens</dt>
        <dd>{rollout.tokens}</dd>
      </div>
      {rollout.trained_tokens !== rollout.tokens ? (
        <div>
          <dt>trained</dt>
          <dd>{rollout.trained_tokens}</dd>
        </div>
      ) : null}
      <div>
        <dt>mismatch</dt>
        <dd>{fixed(rollout.mismatch, 4)}</dd>
      </div>
      <div>
        <dt>ended by</dt>
        <dd>{rollout.finish ?? "–"}</dd>
      </div>
      {Object.entries(rollout.seconds).map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{number(value, 2)} s</dd>
        </div>
      ))}
    </dl>
  );
}

function Completion({
  run,
  rollout,
  place,
  isActive,
  onRead,
}: {
  run: number;
  rollout: Detail;
  place: string;
  isActive: boolean;
  onRead: (line: string) => void;
}) {
  const { colour, chosen } = useStore(look);
  const box = useRef<HTMLElement>(null);
  useEffect(() => {
    if (isActive) box.current!.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [isActive]);
  const isChosen = chosen.has(rollout.id);
  return (
    <article
      ref={box}
      class={`completion${isActive ? " active" : ""}${isChosen ? " chosen" : ""}`}
      aria-label={`Completion ${rollout.sample}`}
    >
      <header>
        <label>
          <input
            type="checkbox"
            checked={isChosen}
            onChange={() => toggleChosen(rollout.id)}
            aria-label={`Choose completion ${rollout.sample}`}
          />
          <span class="faint">#{rollout.sample}</span>
        </label>
        <span class="grow" />
        {place ? <span class={`sign ${place === "best" ? "good" : "bad"}`}>{place}</span> : null}
        {isByOther(rollout.author) ? <span class="sign">by the {rollout.author}</span> : null}
        {rollout.truncated ? <span class="sign warn">cut off</span> : null}
        {rollout.masked ? <span class="sign">masked</span> : null}
        <b class="score">{fixed(rollout.reward, 2)}</b>
      </header>
      <Facts rollout={rollout} />
      {rollout.error_text ? <p class="notice bad">{rollout.error_text}</p> : null}
      {rollout.failure_list.map((failure, i) => (
        <p key={i} class="notice bad">
          Reward <b>{failure.reward}</b> failed ({failure.kind}): {failure.message}
        </p>
      ))}
      {Object.entries(rollout.extras).map(([name, text]) => (
        <p key={name} class="notice extra">
          <b>{name}</b> {text}
        </p>
      ))}
      <Calls calls={rollout.calls} pictures={picturesOfRollouts(run, rollout.images)} />
      {rollout.pieces.length ? (
        <Tokens tokens={rollout} colour={colour} label={`Tokens of completion ${rollout.sample}`} onRead={onRead} />
      ) : null}
      {rollout.tokens > rollout.pieces.length ? (
        <p class="faint">
          The first {rollout.pieces.length} of {count(rollout.tokens, "token")}.
        </p>
      ) : null}
    </article>
  );
}

/** "best" and "worst" where there is such a one. */
function places(group: Group): string[] {
  const rewards = group.rollouts.map((rollout) => rollout.reward).filter((value) => value !== null);
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  if (!(least < most)) return group.rollouts.map(() => "");
  const best = group.rollouts.findIndex((rollout) => rollout.reward === most);
  const worst = group.rollouts.findIndex((rollout) => rollout.reward === least);
  return group.rollouts.map((_, i) => (i === best ? "best" : i === worst ? "worst" : ""));
}

function Prompt({ run, group }: { run: number; group: Group }) {
  const [isRaw, setRaw] = useState(false);
  const first = group.rollouts[0];
  return (
    <section class="prompt-box" aria-label="Prompt">
      <div class="prompt-head">
        <h3>Prompt</h3>
        <span class="faint">{count(first.prompt_tokens, "token")}</span>
        <span class="grow" />
        {first.prompt_seen !== null ? (
          <button class="plain link" aria-pressed={isRaw} onClick={() => setRaw(!isRaw)}>
            {isRaw ? "As messages" : "As the model saw it"}
          </button>
        ) : null}
      </div>
      {isRaw ? (
        <pre class="said">{first.prompt_seen}</pre>
      ) : (
        <Spoken said={first.prompt_said} pictures={picturesOfRollouts(run, first.images)} />
      )}
    </section>
  );
}

export function GroupView({ address }: { address: Address }) {
  const [run, step, number_] = ["run", "step", "group"].map((name) => Number(address.words.get(name)));
  const [active, setActive] = useState(0);
  const [line, setLine] = useState("");
  const { colour } = useStore(look);
  const { found: group, failure } = useAnswer(
    () => api.group(run, step, number_),
    [run, step, number_],
    (found) => {
      const sample = Number(address.words.get("sample") ?? -1);
      const place = found.rollouts.findIndex((rollout) => rollout.sample === sample);
      setActive(Math.max(0, place));
      setLine("");
    },
  );

  const rollouts = group?.rollouts ?? [];
  const move = (by: number) => setActive(Math.max(0, Math.min(rollouts.length - 1, active + by)));
  const follow = () => rollouts.length && go("prompt", { run, prompt: rollouts[0].prompt });
  useKeys({
    Escape: () => go("rollouts"),
    j: () => move(1),
    ArrowRight: () => move(1),
    k: () => move(-1),
    ArrowLeft: () => move(-1),
    x: () => rollouts[active] && toggleChosen(rollouts[active].id),
    c: () => look.set({ colour: COLOURS[(COLOURS.indexOf(colour) + 1) % COLOURS.length] }),
    p: follow,
    "]": () => group?.after && openGroup(run, group.after),
    "[": () => group?.before && openGroup(run, group.before),
  });
  if (failure)
    return (
      <main class="view" id="main" tabIndex={-1}>
        <p class="empty bad-ink">{failure}</p>
      </main>
    );
  if (!group) return <main class="view" id="main" tabIndex={-1} aria-busy="true" />;
  const sign = places(group);
  return (
    <main class="view group-view" id="main" tabIndex={-1}>
      <div class="toolbar">
        <button onClick={() => go("rollouts")}>‹ Rollouts</button>
        <h2>
          Step {step} <span class="faint">group {number_}</span>
        </h2>
        <span class="pager">
          <button
            disabled={!group.before}
            onClick={() => group.before && openGroup(run, group.before)}
            aria-label="Group before"
            title="Group before  ["
          >
            ‹
          </button>
          <button
            disabled={!group.after}
            onClick={() => group.after && openGroup(run, group.after)}
            aria-label="Next group"
            title="Next group  ]"
          >
            ›
          </button>
        </span>
        <button id="follow" onClick={follow} title="p">
          This prompt across steps
        </button>
        <span class="grow" />
        <Legend colour={colour} />
        <ColourChoice />
      </div>
      <Prompt run={run} group={group} />
      {group.has_tokenizer ? null : (
        <p class="notice">
          No tokenizer is in this run's folder yet, so tokens are shown by their ids; <code>--tokenizer PATH</code> names one.
        </p>
      )}
      <div class="completions" role="list" aria-label="Completions">
        {rollouts.map((rollout, i) => (
          <div role="listitem" key={rollout.id}>
            <Completion run={run} rollout={rollout} place={sign[i]} isActive={i === active} onRead={setLine} />
          </div>
        ))}
      </div>
      <div class="reading" role="status" aria-live="polite">
        {line || "Point at a token, or walk over them with ← and →, to read its numbers."}
      </div>
    </main>
  );
}
