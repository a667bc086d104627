"""The changes of an export to the files of weights, tensor by tensor."""

from calibrate.errors import CalibrateError
from calibrate.export.plan import ExportPlan
from calibrate.export.queries import Queries, WeightChange, names_by_role
from calibrate.storage.safetensors_file import FLOATS, StoredTensor
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder


def changes_of_files(
    folder: ModelFolder, queries: Queries, plan: ExportPlan
) -> dict[str, WeightChange]:
    """Changes of tensors in the files, by name."""
    tensors: dict[str, StoredTensor] = {}
    for path, header in folder.headers.items():
        for name, tensor in header.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise CalibrateError(f"{path} and another file have {name}; keep one of them")
    names, changes = names_by_role(tensors, queries.architecture), queries.changes(plan)
    stored = {role: tensors[name] for role, name in names.items()}
    modules = {role[:2] for role in changes}
    unlike = [role for role in stored.keys() - changes.keys() if role[:2] in modules]
    unlike += [
        role
        for role in changes
        if role not in stored
        or stored[role].dtype not in FLOATS
        or stored[role].shape != queries.shapes[role]
    ]
    if unlike:
        layer, module, name = min(unlike)
        raise CalibrateError(
            f"{module}.{name} of layer {layer} in {folder.path} is not what its {CONFIG} asks for "
            "in floating point: are the weights of queries quantised? Export the model with plain "
            "weights, and quantise the export"
        )
    return {names[role]: change for role, change in changes.items()}
