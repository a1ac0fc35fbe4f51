"""Circles among the modules of posttrain: imports at module level, inside of functions and under TYPE_CHECKING all count.

python -m scripts.import_circles     prints each circle with the imports that close it; exit code 1 where there is one.
"""

from __future__ import annotations

import sys

import grimp
import networkx


def circles(package: str = "posttrain") -> list[list[tuple[str, str]]]:
    """Each circle as its imports (importer, imported). A package and a module below it are modules like any other."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    return [
        sorted(imports.subgraph(members).edges)
        for members in networkx.strongly_connected_components(imports)
        if len(members) > 1
    ]


def main() -> int:
    found = circles()
    for number, edges in enumerate(sorted(found), start=1):
        print(f"circle {number}:")
        for importer, imported in edges:
            print(f"  {importer} -> {imported}")
    print(f"{len(found)} circles")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
