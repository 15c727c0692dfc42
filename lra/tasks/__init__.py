"""Tasks by name. To add one: a file with the class, a line here, a YAML in conf/task."""

from importlib import import_module

from lra.tasks.base import Task

REGISTRY: dict[str, str] = {
    "listops": "lra.tasks.listops:ListOps",
    "retrieval": "lra.tasks.retrieval:Retrieval",
    "text": "lra.tasks.text:Text",
    "image": "lra.tasks.image:Image",
    "pathfinder": "lra.tasks.pathfinder:Pathfinder",
    "pathx": "lra.tasks.pathfinder:PathX",
    "copying": "lra.tasks.copying:Copying",
    "recall": "lra.tasks.recall:Recall",
}


def load(name: str) -> type[Task]:
    """The task class registered under ``name``; ``ValueError`` lists the names there are."""
    if name not in REGISTRY:
        raise ValueError(f"task={name} is unknown; choose one of {', '.join(REGISTRY)}")
    module, _, cls = REGISTRY[name].partition(":")
    return getattr(import_module(module), cls)
