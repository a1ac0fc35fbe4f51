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

async function answered(path: string, init: RequestInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers: { "X-Posttrain-Token": token }, cache: "no-store" });
  } catch {
    throw new Failure("The viewer does not answer; it may have been ended in its terminal.", 0);
  }
  if (!answer.ok) throw new Failure((await answer.json()).error ?? answer.statusText, answer.status);
  return answer;
}

async function ask<T>(path: string, init: RequestInit): Promise<T> {
  return (await (await answered(path, init)).json()) as T;
}

function address(name: string, words: Words): string {
  const given = Object.entries(words).filter(([, value]) => value !== undefined && value !== "");
  return `/api/${name}?${new URLSearchParams(given.map(([key, value]) => [key, String(value)]))}`;
}

function get<T>(name: string, words: Words = {}): Promise<T> {
  return ask<T>(address(name, words), {});
}

/** As a data URL: an <img> that asked for the address itself could not send the token. */
async function picture(name: string, words: Words): Promise<string> {
  const bytes = await (await answered(address(name, words), {})).blob();
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Failure("The picture could not be read.", 0));
    reader.readAsDataURL(bytes);
  });
}

export const api = {
  runs: () => get<{ version: string; runs: RunState[] }>("runs"),
  metrics: (run: number, since: number, generation: number) => get<Metrics>("metrics", { run, since, generation }),
  info: (run: number) => get<Info>("info", { run }),
  data: (run: number, source: number, start: number) => get<DataPage>("data", { run, source, start }),
  rollouts: (run: number, words: Words) => get<RolloutPage>("rollouts", { run, ...words }),
  group: (run: number, step: number, group: number) => get<Group>("group", { run, step, group }),
  prompt: (run: number, prompt: string) => get<PromptHistory>("prompt", { run, prompt }),
  picture: (run: number, key: string) => picture("picture", { run, key }),
  dataPicture: (run: number, source: number, row: number, image: number) =>
    picture("data_picture", { run, source, row, image }),
  export: (body: object) => ask<Exported>("/api/export", { method: "POST", body: JSON.stringify(body) }),
};
