/** What is chosen, and its export as training data. The file is made in this tab: nothing is written beside the run. */
import { useState } from "preact/hooks";
import { api, Failure } from "./api";
import { count } from "./format";
import { filterWords, live, look, useStore } from "./store";
import type { Exported } from "./types";

const FORMATS: [string, string, string][] = [
  ["dpo", "Pairs for DPO", "prompt, chosen, rejected: the best of a group against its worst"],
  ["sft", "Messages for SFT", "messages, or prompt and completion of plain text"],
  ["prompt-completion", "Prompt and completion", "prompt, completion"],
];

function save(made: Exported): void {
  const url = URL.createObjectURL(new Blob([made.json_lines], { type: "application/x-ndjson" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = made.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function outcome(made: Exported): string {
  const skipped = Object.entries(made.skipped).map(([reason, times]) => `${times} left out: ${reason}`);
  return [`${count(made.rows, "row")} in ${made.name}`, ...skipped].join("; ");
}

export function Selection() {
  const { run, chosen, filter } = useStore(look);
  const { runs } = useStore(live);
  const [format, setFormat] = useState("dpo");
  const [told, setTold] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  if (!runs.find((each) => each.id === run)?.rollouts) return null;
  const start = async (what: object) => {
    setBusy(true);
    try {
      const made = await api.export({ run, format, ...what });
      if (made.rows) save(made);
      setTold(outcome(made));
    } catch (error) {
      setTold((error as Failure).message);
    }
    setBusy(false);
  };
  return (
    <footer class="selection" aria-label="Export">
      <span>
        <b id="chosen">{chosen.size}</b> chosen
      </span>
      {chosen.size ? (
        <button class="plain link" onClick={() => look.set({ chosen: new Set() })}>
          Clear
        </button>
      ) : null}
      <span class="bar" />
      <label class="field">
        Export as
        <select
          id="format"
          value={format}
          onChange={(e) => setFormat(e.currentTarget.value)}
          title={FORMATS.find(([name]) => name === format)![2]}
        >
          {FORMATS.map(([name, label]) => (
            <option key={name} value={name}>
              {label}
            </option>
          ))}
        </select>
      </label>
      <button id="export-chosen" disabled={!chosen.size || isBusy} onClick={() => start({ ids: [...chosen] })}>
        Chosen
      </button>
      <button id="export-all" disabled={isBusy} onClick={() => start({ filter: filterWords(filter) })}>
        All that the filter finds
      </button>
      <span class="told" role="status" aria-live="polite">
        {told}
      </span>
    </footer>
  );
}
