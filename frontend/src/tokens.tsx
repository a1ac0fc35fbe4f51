/** Tokens of a completion, each with a background that says something about it. Spans are made by hand: there may be thousands. */
import { useEffect, useRef } from "preact/hooks";
import { number } from "./format";
import type { Colour } from "./store";
import type { TokenColumns } from "./types";

const LEVELS = 7;

export interface Shown extends TokenColumns {
  advantage?: number | null;
}

const level = (share: number) => Math.max(0, Math.min(LEVELS, Math.round(share * LEVELS)));

/** For each way of colouring: the class of one token. Log-probs span 0 to -6, differences 0.003 to 1 by their logarithm. */
export const COLOURINGS: Record<Colour, (tokens: Shown, i: number) => string> = {
  none: () => "",
  logp: (tokens, i) => {
    const value = tokens.sampling_logps?.[i] ?? tokens.old_logps?.[i];
    return tokens.trained[i] && value != null ? `t-logp-${level(-value / 6)}` : "t-context";
  },
  advantage: (tokens, i) => {
    const value = tokens.advantage ?? 0;
    if (!tokens.trained[i]) return "t-context";
    return `${value < 0 ? "t-bad" : "t-good"}-${level(Math.abs(value) / 2)}`;
  },
  mask: (tokens, i) => (tokens.trained[i] ? "t-trained" : "t-context"),
  mismatch: (tokens, i) => {
    const [one, other] = [tokens.sampling_logps?.[i], tokens.old_logps?.[i]];
    if (!tokens.trained[i] || one == null || other == null) return "t-context";
    const apart = Math.abs(one - other);
    return `t-apart-${apart < 0.003 ? 0 : level((Math.log10(apart) + 2.5) / 2.5)}`;
  },
};

export const COLOUR_NAMES: Record<Colour, string> = {
  logp: "log-prob",
  advantage: "advantage",
  mask: "mask",
  mismatch: "mismatch",
  none: "none",
};
const SCALES: Record<Colour, [string, string, string] | null> = {
  logp: ["t-logp", "certain", "log-prob −6"],
  advantage: ["t-good", "0", "+2 (red: negative)"],
  mask: null,
  mismatch: ["t-apart", "equal", "1 nat apart"],
  none: null,
};

export function Legend({ colour }: { colour: Colour }) {
  const scale = SCALES[colour];
  if (colour === "mask") {
    return (
      <span class="legend">
        <span class="swatch t-trained">trained</span>
        <span class="swatch t-context">context</span>
      </span>
    );
  }
  if (!scale) return null;
  const [name, least, most] = scale;
  return (
    <span class="legend">
      {least}
      <span class="scale" aria-hidden="true">
        {Array.from({ length: LEVELS + 1 }, (_, i) => (
          <i key={i} class={`${name}-${i}`} />
        ))}
      </span>
      {most}
    </span>
  );
}

/** What is known about one token, in a line. */
export function reading(tokens: Shown, i: number): string {
  const [sampled, scored, reference] = [tokens.sampling_logps?.[i], tokens.old_logps?.[i], tokens.reference_logps?.[i]];
  const parts = [`${JSON.stringify(tokens.pieces[i])}  id ${tokens.ids[i]}`, tokens.trained[i] ? "trained" : "context"];
  if (sampled != null) parts.push(`sampler ${number(sampled)} (p ${number(Math.exp(sampled), 3)})`);
  if (scored != null) parts.push(`trainer ${number(scored)}`);
  if (sampled != null && scored != null) parts.push(`apart ${number(Math.abs(sampled - scored), 3)}`);
  if (reference != null) parts.push(`reference ${number(reference)}`);
  if (tokens.advantage != null) parts.push(`advantage ${number(tokens.advantage, 3)}`);
  return parts.join(" · ");
}

interface Props {
  tokens: Shown;
  colour: Colour;
  label: string;
  onRead: (line: string) => void;
}

export function Tokens({ tokens, colour, label, onRead }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const cursor = useRef(-1);
  useEffect(() => {
    const made = document.createDocumentFragment();
    tokens.pieces.forEach((piece, i) => {
      const span = document.createElement("span");
      span.textContent = piece === "" ? "·" : piece;
      span.dataset.i = String(i);
      made.append(span);
    });
    box.current!.replaceChildren(made);
    cursor.current = -1;
  }, [tokens]);
  useEffect(() => {
    const paint = COLOURINGS[colour];
    const spans = box.current!.children;
    for (let i = 0; i < spans.length; i++) spans[i].className = paint(tokens, i);
  }, [tokens, colour]);

  const read = (i: number) => {
    const spans = box.current!.children;
    spans[cursor.current]?.classList.remove("cursor");
    cursor.current = Math.max(0, Math.min(spans.length - 1, i));
    const span = spans[cursor.current];
    span?.classList.add("cursor");
    if (span) onRead(reading(tokens, cursor.current));
    return span;
  };
  const onKey = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    read(cursor.current + by)?.scrollIntoView({ block: "nearest" });
  };
  const onOver = (event: MouseEvent) => {
    const i = (event.target as HTMLElement).dataset?.i;
    if (i !== undefined) read(Number(i));
  };
  return <div ref={box} class="tokens" role="document" tabIndex={0} aria-label={label} onKeyDown={onKey} onMouseOver={onOver} />;
}
