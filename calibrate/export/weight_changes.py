"""The changes of an export to the files of weights, tensor by tensor."""

from calibrate.errors import CalibrateError
from calibrate.export.plan import Plan
from calibrate.export.queries import Change, Queries, places_of
from calibrate.storage.safetensors_file import FLOATS, Tensor
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder


def changes_of_files(folder: ModelFolder, queries: Queries, plan: Plan) -> dict[str, Change]:
    """Changes of tensors in the files, by name."""
    tensors: dict[str, Tensor] = {}
    for path, header in folder.headers.items():
        for name, tensor in header.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise CalibrateError(f"{path} and another file have {name}; keep one of them")
    places, changes = places_of(tensors, queries.architecture), queries.changes(plan)
    stored = {place: tensors[name] for place, name in places.items()}
    modules = {place[:2] for place in changes}
    unlike = [place for place in stored.keys() - changes.keys() if place[:2] in modules]
    unlike += [
        place
        for place in changes
        if place not in stored
        or stored[place].dtype not in FLOATS
        or stored[place].shape != queries.shapes[place]
    ]
    if unlike:
        layer, module, name = min(unlike)
        raise CalibrateError(
            f"{module}.{name} of layer {layer} in {folder.path} is not what its {CONFIG} asks for "
            "in floating point: are the weights of queries quantised? Export the model with plain "
            "weights, and quantise the export"
        )
    return {places[place]: change for place, change in changes.items()}
