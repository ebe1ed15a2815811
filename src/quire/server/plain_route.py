"""Routes whose endpoints take nothing, or a JSON body as one model. FastAPI documents them, but they are called without
its handling of dependencies, forms and parameters, which costs more than the endpoints themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

M = TypeVar("M", bound=BaseModel)


class PlainRoute(APIRoute):
    """An APIRoute. An endpoint that takes at most one body, which is a model, and the request is called directly.
    Errors in a body are those of FastAPI."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        takes = self.dependant
        others = takes.dependencies, takes.path_params, takes.query_params, takes.header_params, takes.cookie_params
        self.needs_fastapi = any(others) or len(takes.body_params) > 1
        if not self.needs_fastapi:
            self.app = request_response(self._plain_endpoint(endpoint))

    def _plain_endpoint(self, endpoint: Callable[..., Any]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        models = {body.name: cast(type[BaseModel], body.field_info.annotation) for body in self.dependant.body_params}
        request_name = self.dependant.request_param_name

        async def answer(request: Request) -> Response:
            given: dict[str, Any] = {name: await read_body(request, model) for name, model in models.items()}
            if request_name is not None:
                given[request_name] = request
            return cast(Response, await endpoint(**given))

        return answer


async def read_body(request: Request, model: type[M]) -> M:
    """Return a request's body as a `model`. Raise RequestValidationError if it is invalid."""
    raw = await request.body()
    given: Any = raw
    if not raw:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    if is_json(request.headers.get("content-type") or ""):
        try:
            given = json.loads(raw)
        except json.JSONDecodeError as error:
            found = {
                "type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {},
                "ctx": {"error": error.msg},
            }  # fmt: skip
            raise RequestValidationError([found]) from error
        except Exception as error:  # invalid UTF-8, too much nesting, too many digits
            raise HTTPException(400, "There was an error parsing the body") from error
    try:
        return model.model_validate(given, from_attributes=True)
    except ValidationError as error:
        found_all = error.errors(include_url=False)
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in found_all]) from error


def is_json(content_type: str) -> bool:
    """Return True if a Content-Type means JSON."""
    if content_type == "application/json":
        return True
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))
