/** Words that two texts share and those that only one of them has (longest common subsequence). */
export interface Piece {
  text: string;
  kind: "same" | "gone" | "new";
}
const MOST_CELLS = 4_000_000;

export function wordDiff(before: string, after: string): Piece[] {
  const one = before.split(/(\s+)/).filter(Boolean);
  const two = after.split(/(\s+)/).filter(Boolean);
  if (one.length * two.length > MOST_CELLS) {
    return [{ text: after, kind: "same" }];
  }
  const width = two.length + 1;
  const longest = new Uint16Array((one.length + 1) * width);
  for (let i = one.length - 1; i >= 0; i--) {
    for (let j = two.length - 1; j >= 0; j--) {
      longest[i * width + j] =
        one[i] === two[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const pieces: Piece[] = [];
  const add = (text: string, kind: Piece["kind"]) => {
    const last = pieces[pieces.length - 1];
    if (last?.kind === kind) last.text += text;
    else pieces.push({ text, kind });
  };
  let i = 0;
  let j = 0;
  while (i < one.length && j < two.length) {
    if (one[i] === two[j]) {
      add(one[i++], "same");
      j++;
    } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) add(one[i++], "gone");
    else add(two[j++], "new");
  }
  while (i < one.length) add(one[i++], "gone");
  while (j < two.length) add(two[j++], "new");
  return pieces;
}
