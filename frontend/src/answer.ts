/** What the server answers to the question of a view, while the question may change before the answer comes. */
import { useEffect, useState } from "preact/hooks";
import type { Failure } from "./api";

export interface Answer<T> {
  found: T | null;
  failure: string | null;
}

/**
 * Asks when the view appears and whenever one of `parts` changes. Only the newest question is answered: with `]` pressed twice,
 * a slow first answer would otherwise replace the second. What was found before stays until then.
 */
export function useAnswer<T>(question: () => Promise<T>, parts: unknown[], onFound?: (found: T) => void): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T>>({ found: null, failure: null });
  useEffect(() => {
    let isOld = false;
    question().then(
      (found) => {
        if (isOld) return;
        setAnswer({ found, failure: null });
        onFound?.(found);
      },
      (error: Failure) => !isOld && setAnswer({ found: null, failure: error.message }),
    );
    return () => {
      isOld = true;
    };
  }, parts);
  return answer;
}
