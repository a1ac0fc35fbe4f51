/** What the server answers; posttrain/view/api.py makes these. */

export interface RunState {
  id: number;
  name: string;
  path: string;
  step: number | null;
  lines: number;
  generation: number;
  alerts: number;
  rollouts: number;
  rollouts_version: number;
  steps: [number | null, number | null];
  files: number;
  indexed: number;
  compared: number;
  unreadable: Record<string, string>;
}

export interface Metrics {
  generation: number;
  since: number;
  lines: number;
  series: Record<string, [number[], (number | null)[]]>;
}

export type Role = "system" | "user" | "assistant" | "tool" | string;
export interface Message {
  role: Role;
  content?: unknown;
  name?: string;
  tool_calls?: unknown;
}
export type Said = string | Message[];

/** A part of a content: an image of a rollout by its key, one of a row of a dataset by its number in the row. */
export interface Part {
  type: string;
  text?: string;
  key?: string;
  number?: number;
}
/** Where an image of a rollout stands, and what the model was given of it. */
export interface ImageFacts {
  key: string;
  column: string;
  place: number;
  height: number;
  width: number;
  tokens: number;
  start: number;
}

export interface Row {
  id: string;
  prompt: string;
  step: number;
  row: number | null;
  group: number;
  sample: number;
  author: string | null;
  reward: number | null;
  rewards: Record<string, number | null>;
  advantage: number | null;
  tokens: number;
  trained_tokens: number;
  mismatch: number | null;
  tool_calls: number;
  tool_errors: number;
  failures: number;
  policy_version: number | null;
  finish: string | null;
  error: boolean;
  masked: boolean;
  truncated: boolean;
  prompt_text: string;
  completion_text: string;
}

export interface RolloutPage {
  version: number;
  all: number;
  total: number;
  start: number;
  rows: Row[];
  rewards: string[];
  histogram: { counts: number[]; edges: number[] } | null;
  extents: Record<string, [number | null, number | null]>;
  flags: string[];
  sorts: string[];
  formats: string[];
}

export interface TokenColumns {
  pieces: string[];
  ids: number[];
  trained: number[];
  sampling_logps?: (number | null)[] | null;
  old_logps?: (number | null)[] | null;
  reference_logps?: (number | null)[] | null;
}

export interface ToolCall {
  name: string;
  arguments: string;
  result: string | null;
  error: string | null;
  seconds: number | null;
}

export interface Detail extends Row, TokenColumns {
  prompt_said: Said;
  completion_said: Said;
  prompt_seen: string | null;
  prompt_tokens: number;
  extras: Record<string, string>; // what rewards said with `log_extra`
  failure_list: { reward: string; kind: string; message: string }[];
  calls: ToolCall[];
  images: ImageFacts[];
  error_text: string | null;
  seconds: Record<string, number | null>;
  epoch: number | null;
}

export interface Place {
  step: number;
  group: number;
}
export interface Group extends Place {
  has_tokenizer: boolean;
  rollouts: Detail[];
  before: Place | null;
  after: Place | null;
}

export interface PromptTime {
  step: number;
  group: number;
  completions: number;
  mean: number | null;
  rewards: (number | null)[];
  tokens: number | null;
  best: Row & { completion_said: Said };
  worst: Row & { completion_said: Said };
}
export interface PromptHistory {
  prompt: string;
  prompt_said: Said;
  times: PromptTime[];
}

export interface Source {
  name: string;
  kind: string;
  path: string | null;
  note: string;
}
export interface Info {
  path: string;
  options: Record<string, unknown> | null;
  settings: Record<string, Record<string, unknown>>;
  card: string | null;
  alerts: { step: number; kind?: string; seen?: string; meaning?: string; remedy?: string }[];
  skipped_steps: number;
  checkpoints: number[];
  sources: Source[];
}
export interface DataRow {
  row: number;
  fields?: Record<string, unknown>;
  samples?: (TokenColumns & { tokens: number; trained_tokens: number })[];
}
export interface DataPage extends Source {
  rows: DataRow[];
  page_rows: number; // as many as a full page has
  start: number;
  total: number | null;
  more: boolean;
}

export interface Exported {
  name: string;
  rows: number;
  skipped: Record<string, number>;
  json_lines: string;
}
