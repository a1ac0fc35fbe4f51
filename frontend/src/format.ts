/** Numbers and texts as people read them. */

const MOST_DIGITS = 12;

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

/** The marks of an axis: 500k, 1.5M. As few digits as tell them apart. */
export function ticks(marks: (number | null)[]): string[] {
  for (let digits = 3; ; digits++) {
    const words = marks.map((mark) => (mark === null ? "" : tick(mark, digits)));
    const shown = words.filter(Boolean);
    if (digits === MOST_DIGITS || new Set(shown).size === shown.length) return words;
  }
}

function tick(value: number, digits: number): string {
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(digits - 2);
  for (const [unit, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ] as const) {
    if (size >= 10 * unit || (unit > 1e3 && size >= unit)) return `${Number((value / unit).toPrecision(digits))}${letter}`;
  }
  return number(value, digits);
}

/** For columns: the same number of places in every row. */
export function fixed(value: number | null | undefined, places: number): string {
  return value === null || value === undefined ? "–" : value.toFixed(places).replace(/^-(0\.?0*)$/, "$1");
}

export function count(value: number, noun: string): string {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

export function textOf(content: unknown): string {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content) && content.every((part) => part && typeof part === "object" && "type" in part)) {
    return content.map((part) => (part.type === "text" ? String(part.text ?? "") : `[${part.type}]`)).join("");
  }
  return JSON.stringify(content, null, 1);
}

/** Whether somebody else than the policy wrote a completion: its reference, or a mixture of both. */
export function isByOther(author: string | null): boolean {
  return author !== null && author !== "policy";
}

export const FLAG_NAMES: Record<string, string> = {
  error: "errors",
  failed_reward: "failed rewards",
  tool_calls: "tool calls",
  tool_error: "tool errors",
  images: "images",
  truncated: "cut off",
  masked: "masked",
  no_advantage: "no advantage",
};
