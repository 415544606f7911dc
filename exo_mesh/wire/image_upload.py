"""Sends the pixels of a request's images to its driver, in pieces, and then the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from exo_mesh.domain.images import Picture, pieces_of
from exo_mesh.errors import PeerVersionError
from exo_mesh.wire.calls import GENERATE, PUT_IMAGE
from exo_mesh.wire.channels import method_of
from exo_mesh.wire.driver_codec import PIECE
from exo_mesh.wire.proto import driver_pb2 as pb


class UploadedCall:
    """A call of Generate that begins once the images are at the driver. It has those parts of a gRPC call that
    DriverCall uses."""

    def __init__(self, channel: grpc.aio.Channel, request: pb.GenerateRequest, pictures: Sequence[Picture]) -> None:
        self._channel = channel
        self._request = request
        self._pictures = pictures
        self._call: Any = None

    async def read(self) -> Any:
        """The next message of the answer. Raises AioRpcError, or PeerVersionError for a driver of an older version."""
        if self._pictures:
            await self._upload()
            self._pictures = ()
            self._call = method_of(self._channel, GENERATE)(self._request)
        return await self._call.read()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _upload(self) -> None:
        """Send each different image once."""
        for picture in {picture.spec.digest: picture for picture in self._pictures}.values():
            pieces = map(PIECE.write, pieces_of(picture))
            self._call = method_of(self._channel, PUT_IMAGE)(pieces, timeout=PUT_IMAGE.deadline_s)
            try:
                await self._call
            except grpc.aio.AioRpcError as exc:
                if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise PeerVersionError(
                        "the driver of the model's ring takes no images; install one version on all peers"
                    ) from exc
                raise
