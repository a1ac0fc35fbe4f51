/**
 * Keys of the view that is shown. While somebody types, only Escape and Enter are heard. Listeners come and go with what is seen
 * (layout effects, before the paint): a dialog that is on the screen and does not listen yet leaves its Escape to the view behind.
 */
import { useLayoutEffect, useRef } from "preact/hooks";

export type Keys = Record<string, (event: KeyboardEvent) => void>;

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  const isField = target instanceof HTMLInputElement && !["checkbox", "range", "radio", "button"].includes(target.type);
  return isField || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
}

/** Takes the focus from a field or button, so that Enter means the row that is marked. */
export function unfocus(): void {
  (document.activeElement as HTMLElement | null)?.blur();
}

export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    const listener = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const isOnButton = event.target instanceof HTMLElement && event.target.closest("button, a, summary, input") !== null;
      if (isTyping(event.target) && event.key !== "Escape") return;
      if (isOnButton && (event.key === "Enter" || event.key === " ")) return;
      const action = latest.current[event.key];
      if (action) {
        event.preventDefault();
        action(event);
      }
    };
    addEventListener("keydown", listener);
    return () => removeEventListener("keydown", listener);
  }, []);
}

/** For a dialog: Escape closes it, and nothing behind it hears a key. */
export function useDialogKeys(onClose: () => void, isOpen = true): void {
  const latest = useRef(onClose);
  latest.current = onClose;
  useLayoutEffect(() => {
    if (!isOpen) return;
    const listener = (event: KeyboardEvent) => {
      if (event.key === "Tab" || event.key === "Enter" || event.key === " ") return;
      event.stopPropagation();
      if (event.key === "Escape") latest.current();
    };
    addEventListener("keydown", listener, { capture: true });
    return () => removeEventListener("keydown", listener, { capture: true });
  }, [isOpen]);
}
