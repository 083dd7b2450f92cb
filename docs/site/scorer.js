// Search results: lessons and other texts come before pairs, and answers come last.
const below = (page) => /ANSWERS|ROWS/.test(page) ? 20 : /-after-|OUTPUT/.test(page) ? 10 : 0;
var Scorer = {
  score: ([page, , , , score]) => score - below(page),
  title: 15, partialTitle: 7, term: 5, partialTerm: 2, // Sphinx's own
};
