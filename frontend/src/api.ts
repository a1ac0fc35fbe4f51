/** Questions to the server, with the token that came behind `#` in the address. */
import type { DataPage, Exported, Group, Info, Metrics, PromptHistory, RolloutPage, RunState } from "./types";

const KEY = "posttrain-token";

/** Takes the token out of the address, so that it is on no screenshot, and keeps it for this tab. */
function readToken(): string {
  const found = /[#&]token=([\w-]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}
const token = readToken();
addEventListener("hashchange", () => location.hash.includes("token=") && location.reload()); // the address was pasted again

export class Failure extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

type Words = Record<string, string | number | undefined>;

async function ask<T>(path: string, init: RequestInit): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers: { "X-Posttrain-Token": token }, cache: "no-store" });
  } catch {
    throw new Failure("The viewer does not answer; it may have been ended in its terminal.", 0);
  }
  const content = await answer.json();
  if (!answer.ok) throw new Failure(content.error ?? answer.statusText, answer.status);
  return content as T;
}

function get<T>(name: string, words: Words = {}): Promise<T> {
  const given = Object.entries(words).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([key, value]) => [key, String(value)]));
  return ask<T>(`/api/${name}?${query}`, {});
}

export const api = {
  runs: () => get<{ version: string; runs: RunState[] }>("runs"),
  metrics: (run: number, since: number, generation: number) => get<Metrics>("metrics", { run, since, generation }),
  info: (run: number) => get<Info>("info", { run }),
  data: (run: number, source: number, start: number) => get<DataPage>("data", { run, source, start }),
  rollouts: (run: number, words: Words) => get<RolloutPage>("rollouts", { run, ...words }),
  group: (run: number, step: number, group: number) => get<Group>("group", { run, step, group }),
  prompt: (run: number, prompt: string) => get<PromptHistory>("prompt", { run, prompt }),
  export: (body: object) => ask<Exported>("/api/export", { method: "POST", body: JSON.stringify(body) }),
};
