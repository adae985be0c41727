"""Bodies of requests and responses, in the shape of LibreTranslate."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr


class TranslateRequest(BaseModel):
    """Text to translate."""

    model_config = ConfigDict(extra="ignore")

    q: StrictStr | list[StrictStr] = Field(description="A text, or several.")
    source: Annotated[StrictStr, Field(description="Code of the source language; auto stands for the only one.")]
    target: Annotated[StrictStr, Field(description="Code of the target language.")]
    format: Literal["text", "html"] = Field("text", description="Format of the text.")
    api_key: StrictStr | None = Field(None, description="Key, if the server requires one.")


class TranslateResponse(BaseModel):
    """The translation: a text for a text, a list for a list."""

    translatedText: str | list[str]


class Language(BaseModel):
    """A source language and the languages that it can be translated to."""

    code: str
    name: str
    targets: list[str]


class ErrorResponse(BaseModel):
    """What was wrong with a request."""

    error: str


class Health(BaseModel):
    """The server is ready."""

    status: Literal["ok"]
    model: str
    version: str
