/** Images in what was said: each in its place, small; a click shows it in full, with its size and its tokens. */
import { useEffect, useState } from "preact/hooks";
import { api } from "./api";
import { count, textOf } from "./format";
import type { ImageFacts, Part } from "./types";

/** Who finds pictures: of a run's rollouts, or of a row of its data. */
export interface Pictures {
  find: (part: Part) => Promise<string> | null;
  about: (part: Part) => string;
}

export function picturesOfRollouts(run: number, images: ImageFacts[] = []): Pictures {
  const facts = new Map(images.map((image) => [image.key, image]));
  return {
    find: (part) => (part.key === undefined ? null : api.picture(run, part.key)),
    about: (part) => {
      const known = part.key === undefined ? undefined : facts.get(part.key);
      return known ? `${known.height} × ${known.width}, ${count(known.tokens, "token")}` : "";
    },
  };
}

export function picturesOfRow(run: number, source: number, row: number): Pictures {
  return {
    find: (part) => (part.number === undefined ? null : api.dataPicture(run, source, row, part.number)),
    about: () => "",
  };
}

function Picture({ part, pictures }: { part: Part; pictures: Pictures }) {
  const [url, setUrl] = useState("");
  const [failure, setFailure] = useState("");
  const [isLarge, setLarge] = useState(false);
  useEffect(() => {
    let isGone = false;
    pictures.find(part)?.then(
      (found) => isGone || setUrl(found),
      (error: Error) => isGone || setFailure(error.message),
    );
    return () => void (isGone = true);
  }, [part.key, part.number]);
  const name = part.key ? `Image ${part.key.slice(0, 8)}` : `Image ${part.number}`;
  const about = [pictures.about(part), part.key].filter(Boolean).join(", ");
  if (failure) return <span class="faint">[image: {failure}]</span>;
  if (!url) return <span class="faint">[image]</span>;
  return (
    <button class={`picture${isLarge ? " large" : ""}`} aria-pressed={isLarge} title={about} onClick={() => setLarge(!isLarge)}>
      <img src={url} alt={name} />
      {isLarge ? <span class="faint">{about}</span> : null}
    </button>
  );
}

function isParts(content: unknown): content is Part[] {
  return Array.isArray(content) && content.every((part) => part && typeof part === "object" && "type" in part);
}

/** A content: texts as they are, images in their places. */
export function Content({ content, pictures }: { content: unknown; pictures?: Pictures }) {
  if (!pictures || !isParts(content)) return <>{textOf(content)}</>;
  return (
    <>
      {content.map((part, i) =>
        part.key !== undefined || part.number !== undefined ? (
          <Picture key={i} part={part} pictures={pictures} />
        ) : (
          textOf([part])
        ),
      )}
    </>
  );
}

/** What a tool returned: a text, which is JSON where it has images. */
export function Result({ text, pictures }: { text: string; pictures?: Pictures }) {
  if (pictures && text.startsWith("[{")) {
    try {
      const content = JSON.parse(text);
      if (isParts(content)) return <Content content={content} pictures={pictures} />;
    } catch {
      // a text that looks like JSON
    }
  }
  return <>{text}</>;
}
