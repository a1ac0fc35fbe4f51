// Builds src/ into ../posttrain/view/static, or the folder that is named, with the hash of what it was built from.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ? resolve(process.argv[2]) : join(here, "..", "posttrain", "view", "static");

/** Files that decide the result, by name. tests/view/test_frontend.py computes the same hash. */
function sources() {
  const found = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"].map((name) => join(here, name));
  for (const entry of readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })) {
    if (entry.isFile()) found.push(join(entry.parentPath, entry.name));
  }
  const name = (path) => relative(here, path).split("\\").join("/");
  return found.map((path) => [name(path), path]).sort(([one], [other]) => (one < other ? -1 : 1));
}

function hashOf(files) {
  const hash = createHash("sha256");
  for (const [name, path] of files) {
    const content = readFileSync(path);
    hash.update(`${name}\n${content.length}\n`);
    hash.update(content);
  }
  return hash.digest("hex");
}

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
await build({
  entryPoints: [{ in: join(here, "src", "main.tsx"), out: "app" }],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  outdir: target,
});
for (const name of ["index.html", "favicon.svg"]) cpSync(join(here, "src", name), join(target, name));

const notices = ["preact", "uplot"].map((name) => {
  const { version, license } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json"), "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(target, "THIRD_PARTY.txt"), notices.join("\n\n"));
writeFileSync(join(target, "build.json"), JSON.stringify({ sources: hashOf(sources()) }) + "\n");
