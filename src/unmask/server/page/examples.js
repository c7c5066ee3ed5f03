// Three things to try with one click, chosen so that the built-in model does them well.

export const EXAMPLES = {
  fill: {
    tab: "fill",
    text: "The little bear was sad because [MASK:1..8]. Then a kind bird came and helped him.",
  },
  generate: {
    tab: "generate",
    text: "One day, a little girl named Lily found a",
  },
  choices: {
    tab: "fill",
    text: "Tom wanted to touch the fire. \"[MASK:1..3],\" said Mom. \"It is too hot. You can get hurt.\"",
    constraint: { kind: "choices", text: "Yes\nNo" },
  },
};
