"""Bodies of requests and responses, in the shape of LibreTranslate."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

MAX_ALTERNATIVES = 10


def whole_number(value: object) -> object:
    """A number such as 1.0, which is an integer in JSON, as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class TranslateRequest(BaseModel):
    """Text to translate."""

    model_config = ConfigDict(extra="ignore")

    q: StrictStr | list[StrictStr] = Field(description="A text, or several.")
    source: Annotated[StrictStr, Field(description="Code of the source language; auto stands for the only one.")]
    target: Annotated[StrictStr, Field(description="Code of the target language.")]
    format: Literal["text", "html"] = Field("text", description="Format of the text.")
    alternatives: Annotated[StrictInt, BeforeValidator(whole_number)] = Field(
        0, ge=0, le=MAX_ALTERNATIVES, description="Number of alternative translations of every text."
    )
    api_key: StrictStr | None = Field(None, description="Key, if the server requires one.")


class TranslateResponse(BaseModel):
    """The translation: a text for a text, a list for a list. If alternatives are asked for, those of each text, too."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] = Field(
        default_factory=list, description="Up to the number that is asked for, the best first, without repetitions."
    )


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
