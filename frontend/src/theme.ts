/** Light or dark: the system's choice, unless the reader has made one. */
import { useLayoutEffect, useState } from "preact/hooks";
import { Store } from "./store";

type Theme = "system" | "light" | "dark";
const KEY = "posttrain-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
export const themeStore = new Store({ theme: (localStorage.getItem(KEY) as Theme) ?? "system" });

export function isDark(): boolean {
  const { theme } = themeStore.get();
  return theme === "system" ? system.matches : theme === "dark";
}
function apply(): void {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
}
export function toggleTheme(): void {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem(KEY, theme);
  themeStore.set({ theme });
}
themeStore.subscribe(apply);
system.addEventListener("change", () => themeStore.set({}));
apply();

export function useTheme(): string {
  const [name, setName] = useState(isDark() ? "dark" : "light");
  useLayoutEffect(() => themeStore.subscribe(() => setName(isDark() ? "dark" : "light")), []);
  return name;
}
