/** What was said: a text, or messages with their roles; calls of tools are unfolded. */
import { number, textOf } from "./format";
import { Content, type Pictures, Result } from "./pictures";
import type { Message, Said, ToolCall } from "./types";

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 1).replace(/\n\s*/g, " ");
  } catch {
    return json;
  }
}

export function Calls({ calls, pictures }: { calls: ToolCall[]; pictures?: Pictures }) {
  if (!calls.length) return null;
  return (
    <ol class="calls" aria-label="Tool calls">
      {calls.map((call, i) => (
        <li key={i} class={call.error ? "failed" : ""}>
          <div>
            <code class="call">
              <b>{call.name}</b>({pretty(call.arguments)})
            </code>
            {call.seconds !== null ? <span class="faint"> {number(call.seconds, 2)} s</span> : null}
          </div>
          {call.error ? (
            <pre class="bad-ink">{call.error}</pre>
          ) : (
            <pre>
              <Result text={call.result || "(nothing)"} pictures={pictures} />
            </pre>
          )}
        </li>
      ))}
    </ol>
  );
}

interface Asked {
  function?: { name?: string; arguments?: unknown };
}

/** What a message asks of tools: name(arguments), one a line. */
export function callsOf(calls: unknown): string {
  if (!Array.isArray(calls)) return textOf(calls);
  return (calls as Asked[])
    .map(({ function: asked, ...rest }) => {
      if (!asked?.name) return JSON.stringify({ ...rest, function: asked });
      const words = typeof asked.arguments === "string" ? pretty(asked.arguments) : JSON.stringify(asked.arguments ?? {});
      return `${asked.name}(${words})`;
    })
    .join("\n");
}

function One({ message, pictures }: { message: Message; pictures?: Pictures }) {
  return (
    <div class={`message role-${message.role}`}>
      <div class="role">
        {message.role}
        {message.name ? ` ${message.name}` : ""}
      </div>
      <div class="said">
        <Content content={message.content} pictures={pictures} />
      </div>
      {message.tool_calls ? <pre class="said call">{callsOf(message.tool_calls)}</pre> : null}
    </div>
  );
}

export function Spoken({ said, pictures }: { said: Said; pictures?: Pictures }) {
  if (typeof said === "string") return <div class="said">{said}</div>;
  return (
    <>
      {said.map((message, i) => (
        <One key={i} message={message} pictures={pictures} />
      ))}
    </>
  );
}

/** All of it as one text, for comparing. */
export function plain(said: Said): string {
  if (typeof said === "string") return said;
  return said
    .map((message) => [textOf(message.content), message.tool_calls ? callsOf(message.tool_calls) : ""].filter(Boolean).join("\n"))
    .join("\n\n");
}
