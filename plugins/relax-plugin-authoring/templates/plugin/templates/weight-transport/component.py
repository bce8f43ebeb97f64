"""The weight transport `{{ cookiecutter.name }}`: moves each version of the weights as one file in a folder.

The trainer calls `send`, each engine `receive` with the manifest. Replace the file by your network or store. The core checks
the receipts of all engines against the manifest, so a transport may fail but cannot deliver wrong weights unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from relax_core.api import ConfigError, Manifest, Options, TensorInfo, Version, WeightTransport, combined_fingerprint
from relax_core.api.weights import Payload, Resident, Tensors
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.delta import check_own_fingerprint, restore, unchanged_names

HEADER_BYTES = 1 << 14
"""Room for the file's header. A longer header costs a copy of the file."""


class {{ cookiecutter.class_name }}(WeightTransport[Options]):
    """A transport of whole versions through a folder that trainer and engines see."""

    payloads = frozenset({"full"})  # `delta` and `lora` too, once `send` and `receive` can do them

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._sent: dict[str, Manifest] = {}

    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        """Write a version; return its manifest. `write` refuses repeated names and arrays of another dtype than stated."""
        if payload not in self.payloads:
            raise ValueError(f"payload {payload!r}: this transport moves full versions; set weights.payload = 'full'")
        if not location:
            raise ConfigError("weights.location", "nothing", "name a folder that trainer and engines see")
        path = Path(location) / f"{version}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("w+b") as file:
                infos, _ = safetensors_file.write(file, tensors, {"version": str(version)}, HEADER_BYTES)
            if not infos:
                raise ValueError(f"{version}: no tensors were given; pass all tensors of the version")
            unfinished.rename(path)  # a receiver sees a whole version or none
        finally:
            unfinished.unlink(missing_ok=True)
        unchanged = unchanged_names(self._sent.get(version.model), infos)
        manifest = Manifest(version, payload, tuple(infos), str(path), base, combined_fingerprint(infos), unchanged)
        self._sent[version.model] = manifest
        return manifest

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Yield the tensors of a version. `restore` compares each tensor's bytes with the manifest's fingerprint."""
        check_own_fingerprint(manifest)
        path = Path(manifest.location)
        if not path.is_file():
            raise ValueError(f"{manifest.version}: {path} does not exist; the version was released or never written")
        file = safetensors_file.read(path)
        held = {name: (file.dtypes[name], array.shape) for name, array in file.tensors.items()}
        wanted = {info.name: (info.dtype, info.shape) for info in manifest.tensors}
        if held != wanted or file.metadata.get("version") != str(manifest.version):
            raise ValueError(f"{manifest.version}: {path} holds other tensors than the manifest; publish again")
        for info in manifest.tensors:
            yield info, restore(manifest, info, file.tensors[info.name], resident)

    def release(self, manifest: Manifest) -> None:
        Path(manifest.location).unlink(missing_ok=True)
