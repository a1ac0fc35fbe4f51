/** The keys. */
import { useDialogKeys } from "./keys";

const KEYS: [string, [string, string][]][] = [
  [
    "Everywhere",
    [
      ["1 2 3 4", "Curves, rollouts, run, waiting"],
      ["/", "Search"],
      ["Esc", "Back, or out of a field"],
      ["t", "Light or dark"],
      ["?", "This list"],
    ],
  ],
  ["Curves", [["l", "Log scale"]]],
  [
    "Rollouts",
    [
      ["j k ↓ ↑", "Next and previous row"],
      ["Enter", "Open its group"],
      ["x", "Choose for export"],
      ["p", "The same prompt across steps"],
      ["n b", "Next page, page before"],
    ],
  ],
  [
    "A group",
    [
      ["j k → ←", "Next and previous completion"],
      ["c", "Colour tokens by something else"],
      ["x", "Choose for export"],
      ["[ ]", "Group before, next group"],
      ["p", "This prompt across steps"],
      ["→ ←", "In a completion: from token to token"],
    ],
  ],
  [
    "One prompt",
    [
      ["j k", "Next and previous step"],
      ["m", "Compare with this step"],
      ["d", "Mark what changed"],
      ["Enter", "Open the group"],
    ],
  ],
];

export function Help({ onClose }: { onClose: () => void }) {
  useDialogKeys(onClose);
  return (
    <div class="overlay" onClick={(e) => e.target === e.currentTarget && onClose()}>
      <div class="dialog" role="dialog" aria-modal="true" aria-label="Keys">
        <button class="close" autofocus onClick={onClose} aria-label="Close">
          ×
        </button>
        <div class="keys">
          {KEYS.map(([title, keys]) => (
            <section key={title}>
              <h2>{title}</h2>
              <dl>
                {keys.map(([key, what]) => (
                  <div key={key}>
                    <dt>
                      {key.split(" ").map((each) => (
                        <kbd key={each}>{each}</kbd>
                      ))}
                    </dt>
                    <dd>{what}</dd>
                  </div>
                ))}
              </dl>
            </section>
          ))}
        </div>
      </div>
    </div>
  );
}
