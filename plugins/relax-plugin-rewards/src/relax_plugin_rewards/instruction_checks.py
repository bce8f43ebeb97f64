# SPDX-License-Identifier: Apache-2.0
"""Instructions that a program can check: lengths, keywords, formats, first and last words, case, languages.

Checks have the names and arguments of IFEval or of IFBench's training set. The part after the colon also works as a
name. Every check is deterministic and downloads nothing. To add a check, write a function here that takes the response,
and the check's arguments by keyword; their annotations validate the arguments in a task's row.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model

from relax_plugin_rewards.segmentation import bare, occurrences, sentences, split_by, words
from relax_plugin_rewards.writing_systems import SCRIPTS, is_written_in

COMPARED = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
Relation: TypeAlias = Literal["at least", "less than", "at most", "more than", "exactly"]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Place: TypeAlias = Annotated[int, Field(ge=1)]
Text: TypeAlias = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Texts: TypeAlias = Annotated[
    list[Text], Field(min_length=1), BeforeValidator(lambda one: [one] if isinstance(one, str) else one)
]
Letter: TypeAlias = Annotated[str, Field(min_length=1, max_length=1)]
Check: TypeAlias = Callable[..., bool]

CHECKS: dict[str, tuple[Check, type[BaseModel]]] = {}
"""Each check's function and the pydantic model of its arguments, by the check's full name."""


def known_language(code: str) -> str:
    if code.casefold() not in SCRIPTS:
        raise ValueError(f"language {code!r} is unknown; use one of {', '.join(sorted(SCRIPTS))}")
    return code.casefold()


Language: TypeAlias = Annotated[str, AfterValidator(known_language)]


def check(name: str) -> Callable[[Check], Check]:
    """Register a check function as `name`; its keyword arguments become the model that validates a row's arguments."""

    def entered(function: Check) -> Check:
        given = inspect.signature(function, eval_str=True).parameters.values()
        fields: dict[str, Any] = {one.name: (one.annotation, ...) for one in given if one.kind is one.KEYWORD_ONLY}
        CHECKS[name] = function, create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        return function

    return entered


# -- keywords and letters ---------------------------------------------------------------------------------------------


@check("keywords:existence")
def keywords_exist(response: str, *, keywords: Texts) -> bool:
    return all(occurrences(keyword, response) for keyword in keywords)


@check("keywords:forbidden_words")
def no_forbidden_words(response: str, *, forbidden_words: Texts) -> bool:
    """Return True if no forbidden word occurs as a separate word; `art` does not occur in `party`."""
    alternatives = "|".join(re.escape(word) for word in forbidden_words)
    return re.search(rf"(?<!\w)(?:{alternatives})(?!\w)", response, re.IGNORECASE) is None


@check("keywords:frequency")
def keyword_frequency(response: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    return COMPARED[relation](occurrences(keyword, response), frequency)


@check("keywords:word_count_different_numbers")
def keyword_count(response: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    return COMPARED[relation](occurrences(keyword, response), frequency)


@check("keywords:word_once")
def keyword_once(response: str, *, keyword: Text) -> bool:
    return occurrences(keyword, response) == 1


@check("keywords:letter_frequency")
def letter_frequency(response: str, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    return COMPARED[let_relation](response.casefold().count(letter.casefold()), let_frequency)


@check("letters:letter_counting")
def letter_counting(response: str, *, N: Count, relation: Relation) -> bool:  # noqa: N803 - the data sets' name
    return COMPARED[relation](sum(sign.isalpha() for sign in response), N)


@check("keywords:keyword_specific_position")
def keyword_position(response: str, *, keyword: Text, n: Place, m: Place) -> bool:
    """Return True if the m-th word of the n-th sentence is the keyword."""
    found = sentences(response)
    return n <= len(found) and nth_word(found[n - 1], n=m, word=keyword)


@check("words:nth_word")
def nth_word(response: str, *, n: Place, word: Text) -> bool:
    found = [bare(one) for one in response.split() if bare(one)]
    return n <= len(found) and found[n - 1] == bare(word)


@check("keywords:palindrome")
def palindrome(response: str) -> bool:
    """Return True if a word of at least three letters reads the same backwards."""
    return any(len(word) > 2 and word == word[::-1] for word in re.findall(r"[^\W\d_]+", response.casefold()))


@check("keywords:start_end")
def starts_and_ends_alike(response: str) -> bool:
    found = [bare(word) for word in response.split() if bare(word)]
    return len(found) > 1 and found[0] == found[-1]


@check("keywords:no_adjacent_consecutive")
def no_adjacent_consecutive(response: str) -> bool:
    """Return True if no two adjacent words begin with consecutive letters of the alphabet, such as `a` and `b`."""
    initials = [ord(word[0]) for word in words(response.casefold()) if word[0].islower()]
    return all(later - earlier != 1 for earlier, later in pairwise(initials))


@check("count:count_unique")
def unique_words(response: str) -> bool:
    found = words(response.casefold())
    return len(found) == len(set(found))


# -- lengths ----------------------------------------------------------------------------------------------------------


@check("length_constraints:number_words")
def number_words(response: str, *, num_words: Count, relation: Relation) -> bool:
    """Compare the number of words, which `segmentation.words` defines."""
    return COMPARED[relation](len(words(response)), num_words)


@check("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: Count, relation: Relation) -> bool:
    """Compare the number of sentences, which `segmentation.sentences` defines."""
    return COMPARED[relation](len(sentences(response)), num_sentences)


@check("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: Count) -> bool:
    """Return True if the divider `***`, which stands between white space, splits the response into `num_paragraphs`."""
    found = split_by(response, r"(?<!\S)\*{3}(?!\S)")
    return found is not None and len(found) == num_paragraphs


@check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(response: str, *, num_paragraphs: Count, nth_paragraph: Place, first_word: Text) -> bool:
    """Return True if empty lines separate `num_paragraphs` paragraphs and the n-th begins with `first_word`."""
    found = [paragraph.split() for paragraph in re.split(r"\n\s*\n", response) if paragraph.strip()]
    return len(found) == num_paragraphs >= nth_paragraph and bare(found[nth_paragraph - 1][0]) == bare(first_word)


# -- content and format -----------------------------------------------------------------------------------------------


@check("detectable_content:number_placeholders")
def number_placeholders(response: str, *, num_placeholders: Count) -> bool:
    """Return True if at least `num_placeholders` texts with a letter are in square brackets, links and `- [x]` aside."""
    found = re.findall(r"([-*+] |\d\. )?\[([^\[\]\n]+)\](?!\()", response)
    return sum(any(map(str.isalpha, text)) and not (mark and text in "xX") for mark, text in found) >= num_placeholders


@check("detectable_content:postscript")
def postscript(response: str, *, postscript_marker: Text) -> bool:
    """Return True if a line begins with the marker, such as `P.S.`, and text; the marker's dots and spaces may vary."""
    letters = r"\.?\s?".join(re.escape(sign) for sign in postscript_marker if sign.isalnum())
    return bool(letters) and re.search(rf"(?im)^[ \t*_]*{letters}\b[.:]*+[ \t*_]*+\S", response) is not None


@check("detectable_format:number_bullet_lists")
def number_bullet_lists(response: str, *, num_bullets: Count) -> bool:
    """Return True if exactly `num_bullets` lines begin with a bullet and white space; `* * *` and `1.` don't count."""
    return len(re.findall(r"(?m)^[ \t]*[*+•◦▪●‣-][ \t]+(?![*-](?:[ \t]+[*-])*[ \t]*$)\S", response)) == num_bullets


@check("detectable_format:constrained_response")
def constrained_response(response: str) -> bool:
    """Return True if exactly one of `My answer is yes.`, `... no.` and `... maybe.` occurs."""
    return sum(f"My answer is {answer}." in response for answer in ("yes", "no", "maybe")) == 1


@check("detectable_format:number_highlighted_sections")
def number_highlighted_sections(response: str, *, num_highlights: Count) -> bool:
    return len(re.findall(r"\*\*[^\s*][^\n*]*\*\*|\*[^\s*][^\n*]*\*", response)) >= num_highlights


@check("detectable_format:multiple_sections")
def multiple_sections(response: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """Return True if at least `num_sections` different headings occur: splitter and number, such as `Section 1`."""
    return len(set(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?(\d+)", response))) >= num_sections


@check("detectable_format:json_format")
def json_format(response: str) -> bool:
    """Return True if the whole response, or the fenced block that it consists of, is a JSON object or list."""
    text = response.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").removeprefix("JSON")
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


@check("detectable_format:title")
def title(response: str) -> bool:
    return re.search(r"<<[^\S\n]*+[^\s<>][^\n<>]*+>>", response) is not None


@check("detectable_format:square_brackets")
def square_brackets(response: str) -> bool:
    return all(word[0] == "[" and word[-1] == "]" for word in response.split())


@check("combination:two_responses")
def two_responses(response: str) -> bool:
    """Return True if `******` separates exactly two different responses."""
    found = split_by(response, r"\*{6}")
    return found is not None and len(found) == 2 and found[0] != found[1]


@check("combination:repeat_prompt")
def repeat_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    return response.strip().casefold().startswith(prompt_to_repeat.casefold())


# -- beginnings, ends, punctuation ------------------------------------------------------------------------------------


@check("first_word:first_word_answer")
def first_word_of_answer(response: str, *, first_word: Text) -> bool:
    return nth_word(response, n=1, word=first_word)


@check("first_word:first_word_sent")
def first_word_of_sentences(response: str, *, first_word: Text) -> bool:
    found = sentences(response)
    return bool(found) and all(nth_word(sentence, n=1, word=first_word) for sentence in found)


@check("last_word:last_word_answer")
def last_word_of_answer(response: str, *, last_word: Text) -> bool:
    found = [bare(word) for word in response.split() if bare(word)]
    return bool(found) and found[-1] == bare(last_word)


@check("last_word:last_word_sent")
def last_word_of_sentences(response: str, *, last_word: Text) -> bool:
    found = sentences(response)
    return bool(found) and all(last_word_of_answer(sentence, last_word=last_word) for sentence in found)


@check("startend:starts_with")
def starts_with(response: str, *, start_phrase: Text) -> bool:
    text = response.strip().casefold()
    return any(one.startswith(start_phrase.casefold()) for one in (text, text.lstrip("\"'*")))


@check("startend:end_checker")
def ends_with(response: str, *, end_phrase: Text) -> bool:
    text = response.strip().casefold()
    return any(one.endswith(end_phrase.casefold()) for one in (text, text.rstrip("\"'*")))


@check("startend:quotation")
def quotation(response: str) -> bool:
    text = response.strip()
    return text[:1] == text[-1:] == '"' and bool(text[1:-1].strip())


@check("punctuation:no_comma")
def no_comma(response: str) -> bool:
    return not any(comma in response for comma in ",\uff0c\u060c\u3001")


@check("punctuation:punctuation_dot")
def no_dot(response: str) -> bool:
    return "." not in response


@check("punctuation:punctuation_exclamation")
def no_exclamation(response: str) -> bool:
    return "!" not in response


# -- case and language ------------------------------------------------------------------------------------------------


@check("change_case:english_capital")
def all_capitals(response: str) -> bool:
    return response.isupper() and response_language(response, language="en")


@check("change_case:english_lowercase")
def all_lowercase(response: str) -> bool:
    return response.islower() and response_language(response, language="en")


@check("change_case:capital_word_frequency")
def capital_word_frequency(response: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    return COMPARED[capital_relation](sum(word.isupper() for word in words(response)), capital_frequency)


@check("change_case:alternating_case")
def alternating_case(response: str) -> bool:
    """Return True if the case alternates in every word, as in `hElLo` or `HeLlO`."""
    cased = [[sign.isupper() for sign in word if sign.isupper() or sign.islower()] for word in response.split()]
    return any(cased) and all(a != b for word in cased for a, b in pairwise(word))


@check("count:lowercase_counting")
def lowercase_words(response: str, *, N: Count) -> bool:  # noqa: N803 - the data sets' name
    return sum(map(str.islower, words(response))) <= N


@check("language:response_language")
def response_language(response: str, *, language: Language) -> bool:
    return is_written_in(response, language)
