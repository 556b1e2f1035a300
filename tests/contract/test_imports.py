"""No module imports itself by way of others, lazy imports included."""

from __future__ import annotations

import grimp


def test_there_is_no_import_cycle() -> None:
    graph = grimp.build_graph("weft", cache_dir=None)
    imports = {
        module: {
            found for found in graph.find_modules_directly_imported_by(module) if not _is_package_of(found, module)
        }
        for module in graph.modules
    }
    order: list[str] = []
    state: dict[str, int] = {}  # 1: on the path, 2: finished

    def visit(module: str, path: list[str]) -> None:
        state[module] = 1
        for other in sorted(imports[module]):
            assert state.get(other) != 1, " -> ".join([*path[path.index(other) :], other]) if other in path else other
            if other not in state:
                visit(other, [*path, other])
        state[module] = 2
        order.append(module)

    for module in sorted(imports):
        if module not in state:
            visit(module, [module])
    assert set(order) == set(imports)


def _is_package_of(package: str, module: str) -> bool:
    """A package lists its modules lazily (PEP 562), so a module may import the names of its own package."""
    return module.startswith(f"{package}.")
